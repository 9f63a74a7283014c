// The list of live requests. One of them may be chosen; its blocks are then lit in order.

import { compact, count, element, plural } from "./format.js";
import { color, onThemeChange } from "./theme.js";

export class Requests {
  // `onChoose(id)`: the user chose a request, or null for none.
  constructor({ onChoose }) {
    Object.assign(this, { onChoose, rows: new Map(), chosen: null, items: new Map(), totals: {} });
    this.list = document.getElementById("request-list");
    this.sub = document.getElementById("requests-sub");
    this.empty = document.getElementById("requests-empty");
    this.problem = document.getElementById("requests-problem");
    this.more = document.getElementById("requests-more");
    [this.others, this.unlisted] = this.more.children;
    this.unlisted.addEventListener("click", () => this.choose(null));
    onThemeChange(() => this.render());
  }

  // A request that is no longer in the list may still be live, because the list is bounded.
  show(rows) {
    this.rows = new Map(Object.entries(rows));
    this.render();
  }

  tally(totals) {
    this.totals = totals;
    this.sum();
  }

  choose(id) {
    this.chosen = id;
    this.tell("");
    this.onChoose(id);
    this.render();
  }

  render() {
    const entries = [...this.rows].sort(([, a], [, b]) => (a.state === b.state ? 0 : a.state === "running" ? -1 : 1));
    this.sum();
    this.empty.hidden = entries.length > 0;
    for (const [id, item] of this.items) {
      if (!this.rows.has(id)) {
        item.root.remove();
        this.items.delete(id);
      }
    }
    entries.forEach(([id, row], place) => {
      const item = this.items.get(id) ?? this.make(id);
      if (this.list.children[place] !== item.root) this.list.insertBefore(item.root, this.list.children[place] ?? null);
      this.fill(item, id, row);
    });
  }

  // Shows the problem with the chosen request; empty: none.
  tell(problem) {
    if (this.problem.textContent !== problem) this.problem.textContent = problem;
  }

  // Shows the numbers of all requests, which may be more than the listed ones.
  sum() {
    const { live_requests: live = 0, running_sequences: running, waiting_sequences: waiting } = this.totals;
    this.sub.textContent = live ? `${plural(running, "sequence")} running, ${count(waiting)} waiting` : "";
    const others = live - this.rows.size;
    this.more.hidden = others <= 0;
    this.unlisted.hidden = this.chosen === null || this.rows.has(this.chosen);
    this.unlisted.textContent = this.chosen;
    this.others.textContent = `and ${count(others)} more${this.unlisted.hidden ? "" : ", among them"}`;
  }

  make(id) {
    const name = element("span", { class: "name" }, id);
    const what = element("span", { class: "what" });
    const bar = element("canvas", { class: "bar", width: 320, height: 5, "aria-hidden": "true" });
    const toggle = () => this.choose(this.chosen === id ? null : id);
    const button = element("button", { type: "button", onclick: toggle }, name, what, bar);
    const item = { root: element("li", {}, button), button, what, bar };
    this.items.set(id, item);
    return item;
  }

  fill({ button, what, bar }, id, row) {
    button.setAttribute("aria-pressed", id === this.chosen);
    const preempted = row.preemptions ? `, preempted ${row.preemptions}×` : "";
    const parts = [plural(row.num_blocks, "block"), `${compact(row.generated_tokens)} out`];
    what.textContent = row.state === "running" ? parts.join(" · ") : `${row.state}${preempted}`;
    const several = row.num_sequences > 1 ? ` of ${row.num_sequences} sequences` : "";
    button.title =
      `${row.state}: ${plural(row.prompt_tokens, "prompt token")}, ${row.cached_tokens} of them cached, ` +
      `${row.generated_tokens} generated, ${plural(row.num_blocks, "block")}${several}${preempted}`;
    this.progress(bar, row);
  }

  // Draws a request's progress: cached, computed prompt and generated tokens as shares of all that it may come to have.
  progress(bar, row) {
    const context = bar.getContext("2d");
    const scale = bar.width / Math.max(row.max_total_tokens, 1);
    const prompt = Math.min(row.computed_tokens, row.prompt_tokens);
    context.clearRect(0, 0, bar.width, bar.height);
    const part = (name, from, to) => {
      context.fillStyle = color(name);
      context.fillRect(from * scale, 0, Math.max(0, (to - from) * scale), bar.height);
    };
    part("free", 0, row.max_total_tokens);
    part("cached", 0, Math.min(row.cached_tokens, prompt));
    part("active", Math.min(row.cached_tokens, prompt), prompt);
    part("good", row.prompt_tokens, row.prompt_tokens + row.generated_tokens / row.num_sequences);
  }
}
