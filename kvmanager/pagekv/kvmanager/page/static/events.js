// The latest events, newest first.

import { element, plural } from "./format.js";

const SHOWN = 60;
const who = (id) => element("span", { class: "who" }, id);

// By kind of event: its text and elements.
const WORDS = {
  admitted: (e) => [
    who(e.request), ` admitted: ${plural(e.tokens, "token")}, ${e.computed} cached, ${plural(e.blocks, "block")}`,
  ],
  resumed: (e) => [who(e.request), ` is back: ${e.computed} of ${e.tokens} tokens kept`],
  preempted: (e) => [who(e.request), ` preempted, ${e.swapped ? "swapped to the host" : "to be computed again"}`],
  finished: (e) => [who(e.request), ` finished with ${plural(e.tokens, "token")}`],
  aborted: (e) => [who(e.request), ` aborted after ${plural(e.tokens, "token")}`],
  failed: (e) => [who(e.request), " failed"],
  rejected: () => ["a request was refused: too many wait, or its tenant is at a limit"],
  stored: (e) => [`${plural(e.blocks, "block")} stored`],
  evicted: (e) => [`${plural(e.blocks, "block")} evicted`],
  cleared: (e) => [`the cache was cleared: ${plural(e.blocks, "block")}`],
  attached: (e) => [`attached to an executor, epoch ${e.epoch}`],
  detached: () => ["the executor is lost"],
};

export class Events {
  constructor() {
    this.list = document.getElementById("event-list");
    this.empty = document.getElementById("events-empty");
    this.last = 0;
  }

  clear() {
    this.last = 0;
    this.list.replaceChildren();
    this.apply();
  }

  // A new connection repeats some events, which are skipped.
  apply(events = []) {
    for (const event of events) {
      if (event.n <= this.last) continue;
      this.last = event.n;
      const at = new Date(event.at * 1000);
      this.list.prepend(
        element("li", {},
          element("time", { datetime: at.toISOString() }, at.toLocaleTimeString("en-GB")),
          element("span", { class: `swatch ${event.kind}` }),
          element("span", {}, ...(WORDS[event.kind]?.(event) ?? [event.kind]))),
      );
    }
    while (this.list.children.length > SHOWN) this.list.lastChild.remove();
    this.empty.hidden = this.list.children.length > 0;
  }
}
