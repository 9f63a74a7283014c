// The tenants with most blocks, where there are any; a manager whose callers have no identities has none.

import { compact, count, element, plural } from "./format.js";
import { ask } from "./stream.js";

const REFRESH_MS = 2000;
// Where there are none: the first may come at any time.
const NONE_MS = 30000;

export class Tenants {
  constructor() {
    this.card = document.getElementById("tenants");
    this.sub = document.getElementById("tenants-sub");
    this.list = document.getElementById("tenant-list");
    this.timer = 0;
  }

  // Begins to ask, or ends.
  follow(live) {
    clearTimeout(this.timer);
    this.live = live;
    if (live) this.refresh();
  }

  async refresh() {
    // The stream is opened again, and this goes on, once the page can be seen.
    if (document.hidden) return;
    let wait = REFRESH_MS;
    try {
      const { tenants, total } = await ask("/api/tenants");
      this.show(tenants, total);
      if (!total) wait = NONE_MS;
    } catch {
      // The link in the page's head says that nobody answers; a later answer may.
    }
    clearTimeout(this.timer);
    if (this.live) this.timer = setTimeout(() => this.refresh(), wait);
  }

  show(tenants, total) {
    this.card.hidden = !total;
    this.sub.textContent = total > tenants.length ? `the first ${count(tenants.length)} of ${count(total)}` : count(total);
    this.list.replaceChildren(...tenants.map((tenant) => this.row(tenant)));
  }

  row(tenant) {
    const { running_requests: running, waiting_requests: waiting, floor_blocks: floor } = tenant;
    const parts = [plural(tenant.blocks, "block"), `${count(running)} running`, waiting ? `${count(waiting)} waiting` : ""];
    const title =
      `${plural(tenant.prompt_tokens_total, "prompt token")}, ${compact(tenant.cached_tokens_total)} of them cached, ` +
      `${compact(tenant.output_tokens_total)} generated${floor ? `; a floor of ${plural(floor, "block")}` : ""}`;
    return element("li", { title },
      element("span", { class: "name" }, tenant.name),
      element("span", { class: "what" }, parts.filter(Boolean).join(" · ")));
  }
}
