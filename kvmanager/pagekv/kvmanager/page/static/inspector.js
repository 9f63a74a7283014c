// The inspector: shows everything that is known about one block.

import { HOST_STATES, STATES, state } from "./codec.js";
import { duration, element, plural } from "./format.js";
import { ask } from "./stream.js";
import { reducedMotion } from "./theme.js";

const PAUSE_MS = 90;
const CHAIN_SHOWN = 10;
const MEANINGS = {
  free: "holds nothing that anybody could use",
  cached: "nobody holds it; its content can be hit, or evicted",
  active: "one sequence holds it",
  shared: "several sequences hold it",
  pinned: "kept by a pin, used by nobody now",
  held: "kept for a preempted sequence",
};

export class Inspector {
  // `onOpen(index)`: the user opens another device block. `onRequest(id)`: the user opens a request.
  constructor({ onOpen, onRequest }) {
    Object.assign(this, { onOpen, onRequest, map: null, index: -1, timer: 0, bringing: false });
    this.title = document.getElementById("inspector-title");
    this.body = document.getElementById("inspector-body");
    this.close = document.getElementById("inspector-close");
    this.card = document.getElementById("inspector");
    this.age = element("span");
    this.render();
    this.close.addEventListener("click", () => {
      this.map?.focus(-1);
      this.map?.marks.focus();
    });
    this.card.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.index >= 0) this.letGo();
    });
  }

  // Gives the keyboard back to the map, at the block that was chosen there.
  letGo() {
    this.map.marks.focus();
    this.map.focus(this.index, false);
  }

  // Shows a block of a map; -1: none.
  show(map, index, kept) {
    this.close.hidden = !kept;
    if (map === this.map && index === this.index) return;
    Object.assign(this, { map, index, detail: null, problem: "", bringing: false });
    this.render();
    this.load(PAUSE_MS);
  }

  // Loads the block again, because it may have changed.
  refresh() {
    if (this.index >= 0) this.load(0);
  }

  load(pause) {
    clearTimeout(this.timer);
    const { map, index } = this;
    if (index < 0) return;
    this.timer = setTimeout(async () => {
      try {
        const detail = await ask(`/api/${map.isHost ? "host-block" : "block"}/${index}`);
        if (map !== this.map || index !== this.index) return;
        this.detail = detail;
        this.problem = "";
        map.showChain(detail.chain ?? []);
      } catch (error) {
        if (map !== this.map || index !== this.index) return;
        this.problem = error.message;
      }
      this.render();
      if (this.bringing) this.bring();
    }, pause);
  }

  // Scrolls the inspector into view, on a screen where it is below the map, as soon as it has content.
  bring() {
    this.bringing = !this.detail && !this.problem;
    if (this.bringing) return;
    this.card.scrollIntoView({ behavior: reducedMotion.matches ? "auto" : "smooth", block: "nearest" });
  }

  render() {
    const { map, index, detail } = this;
    if (index < 0) {
      this.title.textContent = "What the colours mean";
      this.fill("", () => STATES.map((name) => [this.swatch(name), MEANINGS[name]]));
      return;
    }
    this.title.textContent = `${map.isHost ? "Host block" : "Block"} ${index}`;
    const name = (map.isHost ? HOST_STATES : STATES)[state(map.bytes[index])];
    const { cached_s: cached, ...rest } = detail ?? {};
    this.fill(JSON.stringify([map.isHost, index, name, rest, cached == null, this.problem]), () => {
      const rows = [
        ["state", this.swatch(name, map.isHost)],
        ["", element("span", { class: "sub" }, MEANINGS[name])],
      ];
      if (cached != null) rows.push(["age", this.age]);
      if (detail) rows.push(...this.details(detail));
      if (this.problem) rows.push(["", element("span", { class: "problem" }, this.problem)]);
      return rows;
    });
    // The block is loaded again and again while it is shown, so its age goes on counting.
    if (cached != null) this.age.textContent = `cached for ${duration(cached)}`;
  }

  // Replaces the rows only if `said`, which stands for their text, has changed: a user who reads them, or moves through
  // them by keyboard, is not disturbed.
  fill(said, makeRows) {
    if (said === this.said) return;
    this.said = said;
    const within = this.body.contains(document.activeElement);
    this.body.replaceChildren(this.facts(makeRows()));
    if (within) this.card.focus({ preventScroll: true });
  }

  facts(rows) {
    const pairs = rows.flatMap(([term, value]) => [element("dt", {}, term), element("dd", {}, value)]);
    return element("dl", { class: "facts" }, ...pairs);
  }

  swatch(name, isHost = false) {
    const kind = isHost && name === "cached" ? "host-cached" : name;
    return element("span", { class: "state" }, element("span", { class: `swatch ${kind}` }), name);
  }

  details(detail) {
    const held = detail.ref_count - (detail.pins ?? 0);
    const by = [plural(held, "sequence"), ...(detail.pins ? [plural(detail.pins, "pin")] : [])].join(" and ");
    const rows = [["ref count", detail.ref_count ? `${detail.ref_count}: ${by}` : "0"]];
    if (detail.requests?.length) {
      rows.push(["held by", element("span", { class: "chain" }, ...detail.requests.map((id) =>
        element("button", { type: "button", class: "chip", onclick: () => this.onRequest(id) }, id)))]);
    }
    const mono = (text) => element("span", { class: "mono" }, text);
    rows.push(["hash", detail.block_hash ? mono(detail.block_hash) : "none: not in the prefix table"]);
    if (detail.block_hash && !this.map.isHost) rows.push(["chain", this.chain(detail)]);
    if (detail.text != null) rows.push(["text", element("span", { class: "text" }, detail.text)]);
    else if (detail.token_ids) rows.push(["tokens", mono(detail.token_ids.join(" "))]);
    return rows;
  }

  chain({ chain, chain_complete: complete }) {
    if (!chain.length) return "begins a prompt";
    const chip = (block) =>
      element("button", { type: "button", class: "chip", onclick: () => this.onOpen(block) }, block);
    const shown = chain.slice(0, CHAIN_SHOWN).map(chip);
    const more = chain.length - shown.length;
    const rest = more ? `… ${more}${complete ? "" : " or more"} before` : "";
    return element("span", { class: "chain" }, "after", ...shown, rest);
  }
}
