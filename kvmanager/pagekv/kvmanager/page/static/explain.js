// The explain box: shows for each block of a prompt whether it hits.

import { count, element, percent, plural } from "./format.js";
import { ask } from "./stream.js";

const NAMES = {
  hit: "hit", never_seen: "never seen", evicted: "evicted", cleared: "cleared", other_identity: "other adapter",
  partial_tail: "partial tail", diverged: "diverged", unreachable: "unreachable",
};

export class Explain {
  // `onBlock(index)`: the user points at a block of the pool, -1 for none.
  constructor({ onBlock }) {
    this.onBlock = onBlock;
    this.form = document.getElementById("explain-form");
    this.prompt = document.getElementById("explain-prompt");
    this.namespace = document.getElementById("explain-namespace");
    this.answer = document.getElementById("explain-answer");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
    this.form.addEventListener("change", () => {
      this.prompt.placeholder = this.form.elements.kind.value === "text" ? "Paste a prompt" : "Such as 5, 17, 4";
    });
  }

  async ask() {
    const button = this.form.querySelector("button");
    button.disabled = true;
    try {
      this.show(await ask("/api/explain", this.question()));
    } catch (error) {
      this.answer.replaceChildren(element("p", { class: "problem" }, error.message));
    }
    button.disabled = false;
  }

  question() {
    const about = this.namespace.value ? { namespace: this.namespace.value } : {};
    if (this.form.elements.kind.value === "text") return { ...about, text: this.prompt.value };
    const ids = this.prompt.value.split(/[\s,]+/).filter(Boolean).map(Number);
    if (!ids.every(Number.isInteger)) throw new Error("token ids are whole numbers, with commas or spaces between them");
    return { ...about, token_ids: ids };
  }

  show({ prompt_tokens: tokens, cached_tokens: cached, num_blocks: blocks, blocks: found }) {
    const verdict = cached
      ? `${count(cached)} of ${plural(tokens, "token")} are cached (${percent(cached / tokens)})`
      : `None of ${plural(tokens, "token")} is cached`;
    const hits = found.filter((block) => block.outcome === "hit").length;
    const more = blocks - found.length;
    const all = `${more ? `the first ${count(found.length)} of ` : ""}${plural(blocks, "block")}`;
    const strip = element("div", { class: "strip", role: "img", "aria-label": `${hits} of ${all} hit` },
      ...found.map((block) => element("i", { class: block.outcome, title: `${NAMES[block.outcome]}: ${block.reason}` })));
    this.answer.replaceChildren(
      element("p", { class: "verdict" }, verdict),
      strip,
      element("ol", {}, ...found.map((block) => this.row(block))),
      more ? element("p", { class: "hint" }, `and ${plural(more, "block")} more`) : "",
    );
    this.answer.focus({ preventScroll: true });
  }

  row(block) {
    const point = (index) => () => this.onBlock(index);
    const known = block.block_id !== null;
    return element("li", {
      tabindex: known ? "0" : null,
      "data-outcome": block.outcome,
      "data-block": block.block_id,
      onpointerenter: point(known ? block.block_id : -1),
      onpointerleave: point(-1),
      onfocus: point(known ? block.block_id : -1),
      onblur: point(-1),
    },
      element("span", { class: "where" }, block.end - block.start > 1 ? `${block.start}–${block.end - 1}` : block.start),
      element("span", { class: "outcome" }, element("span", { class: `badge ${block.outcome}` }), NAMES[block.outcome]),
      element("span", { class: "why" }, block.reason, block.text ? element("span", { class: "said" }, block.text) : null));
  }
}
