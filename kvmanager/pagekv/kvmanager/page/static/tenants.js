// The tenants with most blocks. A manager whose callers have no identities has no tenants.

import { compact, count, element, plural } from "./format.js";
import { ask } from "./stream.js";

const REFRESH_MS = 2000;
// Without tenants the page asks less often; the first may come at any time.
const NONE_MS = 30000;

export class Tenants {
  constructor() {
    this.card = document.getElementById("tenants");
    this.sub = document.getElementById("tenants-sub");
    this.list = document.getElementById("tenant-list");
    this.timer = 0;
  }

  // Starts or stops asking for the tenants.
  follow(live) {
    clearTimeout(this.timer);
    this.live = live;
    if (live) this.refresh();
  }

  async refresh() {
    // When the page becomes visible, the stream is opened again and calls `follow`.
    if (document.hidden) return;
    let wait = REFRESH_MS;
    try {
      const { tenants, total } = await ask("/api/tenants");
      this.show(tenants, total);
      if (!total) wait = NONE_MS;
    } catch {
      // The page's head shows that the manager does not answer; a later attempt may succeed.
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
