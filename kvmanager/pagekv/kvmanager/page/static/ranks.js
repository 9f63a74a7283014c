// The work of each rank on a step, if the executor is a group of ranks.

import { count, element, milliseconds } from "./format.js";

// Ranks that are shown; the others are not slower.
const MOST = 16;
const TITLE = "its work on the latest step that all ranks have ended, without waiting for the others";

// A bar that is full for the slowest rank.
function bar(share) {
  const filled = element("span");
  filled.style.width = `${100 * share}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, filled);
}

export class Ranks {
  constructor() {
    this.card = document.getElementById("ranks");
    this.sub = document.getElementById("ranks-sub");
    this.list = document.getElementById("rank-list");
  }

  // `micros`: microseconds by rank; empty for an executor without ranks, or before its first step.
  show(micros) {
    this.card.hidden = !micros.length;
    if (this.card.hidden) return;
    const slowest = micros.map((us, rank) => ({ us, rank })).sort((one, other) => other.us - one.us || one.rank - other.rank);
    const skew = milliseconds((slowest[0].us - slowest.at(-1).us) / 1000);
    const shown = slowest.length > MOST ? `the slowest ${MOST} of ${count(slowest.length)}, ` : "";
    this.sub.textContent = `${shown}rank ${slowest[0].rank} the slowest, skew ${skew}`;
    // By rank: sorted by work they would change places at every step.
    const rows = slowest.slice(0, MOST).sort((one, other) => one.rank - other.rank);
    this.list.replaceChildren(...rows.map(({ us, rank }) =>
      element("li", { title: TITLE },
        element("span", { class: "name" }, `rank ${rank}`),
        element("span", { class: "what" }, `${milliseconds(us / 1000)} a step`),
        bar(us / Math.max(slowest[0].us, 1)))));
  }
}
