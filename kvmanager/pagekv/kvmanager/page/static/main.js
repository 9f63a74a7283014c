// Puts the parts of the page together.

import { BlockMap } from "./blockmap.js";
import { Chart } from "./chart.js";
import { HOST_STATES, MAX_HOLDERS, STATES, holders, state } from "./codec.js";
import { Events } from "./events.js";
import { Explain } from "./explain.js";
import { compact, count, element, milliseconds, percent, plural } from "./format.js";
import { Inspector } from "./inspector.js";
import { Ranks } from "./ranks.js";
import { Requests } from "./requests.js";
import { Stream, ask } from "./stream.js";
import { Tenants } from "./tenants.js";

const REFRESH_MS = 500;
const SILENCE_MS = 1500;
const byId = (id) => document.getElementById(id);
const announcer = byId("announcer");

const inspector = new Inspector({
  onOpen: (index) => device.focus(index, true),
  onRequest: (id) => requests.choose(id),
});

function describe(map, names) {
  return (index) => {
    const byte = map().bytes[index];
    const held = holders(byte);
    const times = held < MAX_HOLDERS ? held : `${held} or more`;
    return `block ${index} · ${names[state(byte)]}${held > 1 ? ` · held ${times} times` : ""}`;
  };
}

function makeMap(root, names, palette, isHost) {
  const map = new BlockMap(root, {
    palette,
    grows: isHost,
    describe: describe(() => map, names),
    onFocus: (index, kept) => {
      inspector.show(map, index, kept);
      if (index >= 0 && document.activeElement === map.marks) announce(map.describe(index));
    },
    onTap: () => inspector.bring(),
    onLeave: (what) => (what === "table" ? requests.choose(null) : inspector.card.focus({ preventScroll: true })),
  });
  map.isHost = isHost;
  return map;
}

const device = makeMap(byId("device-map"), STATES, STATES, false);
const host = makeMap(byId("host-map"), HOST_STATES, ["free", "host-cached", "held"], true);

let announcing = 0;
function announce(text) {
  clearTimeout(announcing);
  announcing = setTimeout(() => (announcer.textContent = text), 150);
}

// -- legends

const LEGENDS = {
  free: "free", cached: "cached: can be hit", active: "active: one holder", shared: "shared by several",
  pinned: "pinned",
};
const HOST_LEGENDS = { free: "free", cached: "cached: can be hit", held: "held for preempted" };

function makeLegend(list, map, legends, swatch = (name) => name) {
  const numbers = {};
  Object.entries(legends).forEach(([name, words], index) => {
    numbers[name] = element("b", {}, "0");
    const button = element("button", { type: "button", "aria-pressed": "false" },
      element("span", { class: `swatch ${swatch(name)}`, "aria-hidden": "true" }), words, numbers[name]);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const other of list.querySelectorAll("button")) other.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-pressed", on);
      map.isolate(on ? index : -1);
    });
    list.append(element("li", {}, button));
  });
  return (counts = {}) => {
    for (const [name, number] of Object.entries(counts)) numbers[name].textContent = count(number);
  };
}
const deviceLegend = makeLegend(byId("device-legend"), device, LEGENDS);
const hostSwatch = (name) => (name === "cached" ? "host-cached" : name);
const hostLegend = makeLegend(byId("host-legend"), host, HOST_LEGENDS, hostSwatch);

// -- charts

let totals = {};
// Adds a tile with the chart of one value of the points to the end of a section.
function tile(section, name, title, options) {
  const figure = element("figure", { class: "tile", id: `tile-${name}` },
    element("figcaption", {}, title),
    element("p", { class: "now" }, element("output", { "aria-live": "off" }, "–"), " ", element("small")),
    element("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "chart", "aria-describedby": "chart-keys",
      "aria-label": title,
    }));
  byId(section).append(figure);
  return new Chart(figure, { read: (point) => point[name], announce, ...options });
}
// Without active blocks there is no share of filled slots.
const filled = () => (totals.active_blocks ? percent(totals.utilization) : "–");
const charts = [
  tile("rates", "hit_rate", "Prefix hit rate", {
    format: percent, top: 1, beside: () => `${percent(totals.prefix_hit_rate ?? 0)} in all`,
  }),
  tile("rates", "usage", "Blocks in use", {
    format: percent, top: 1, beside: () => `${filled()} of their slots filled`,
  }),
  tile("rates", "step_ms", "Step time", { format: milliseconds, beside: () => `${count(totals.steps_total ?? 0)} steps` }),
  tile("rates", "tokens_per_s", "Tokens per second", {
    format: compact,
    beside: (point) => (point.computed_per_s === null ? "" : `generated; ${compact(point.computed_per_s)} computed`),
  }),
  tile("latencies", "ttft_ms", "Time to first token", { format: milliseconds, beside: () => "mean of 10 s" }),
  tile("latencies", "inter_token_ms", "Between tokens", { format: milliseconds, beside: () => "mean of 10 s" }),
  tile("latencies", "queue_ms", "In the queue", {
    format: milliseconds, beside: () => `${count(totals.waiting_sequences ?? 0)} wait now`,
  }),
];

// -- requests, events, explanations

const requests = new Requests({ onChoose: (id) => lightRequest(id, true) });
const events = new Events();
const tenants = new Tenants();
const ranks = new Ranks();
new Explain({ onBlock: (index) => device.focus(index) });

let refreshing = 0;
async function lightRequest(id, afresh) {
  clearTimeout(refreshing);
  if (id === null) return device.choose(null);
  // Nothing is asked for while nobody sees it.
  if (document.hidden) return (refreshing = setTimeout(() => lightRequest(id, afresh), REFRESH_MS));
  try {
    const { sequences } = await ask(`/api/request?id=${encodeURIComponent(id)}`);
    if (requests.chosen !== id) return;
    requests.tell("");
    // The request has ended. The list does not show that, because it may be too short to contain the request.
    if (!sequences.length) return requests.choose(null);
    device.choose([...new Set(sequences.flatMap((sequence) => sequence.block_ids))], afresh);
    if (afresh) announce(`request ${id}: ${plural(device.table.length, "block")} lit in order`);
  } catch (error) {
    if (requests.chosen === id) requests.tell(`The blocks of ${id} cannot be shown: ${error.message}`);
  }
  if (requests.chosen === id) refreshing = setTimeout(() => lightRequest(id, false), REFRESH_MS);
}

// -- the stream

const amount = (all, shown) => (all > shown ? `the first ${count(shown)} of ${count(all)}` : count(all));

let boot = null;

function show(message) {
  if (message.type === "snapshot") {
    // Another run of the manager counts events from 1 again.
    if (message.boot !== boot) events.clear();
    boot = message.boot;
    const epoch = `${boot} ${message.epoch}`;
    if (host.epoch !== epoch) byId("host").hidden = true;
    device.begin(message.shown, epoch);
    host.begin(message.host_shown, epoch);
    const { id, backend, block_size: size } = message.model;
    byId("model").textContent = `${id || "no model"} on ${backend}`;
    byId("device-sub").textContent = `${amount(message.blocks, message.shown)} of ${plural(size, "token")}`;
    byId("host-sub").textContent = `${amount(message.host_blocks, message.host_shown)}, the second tier`;
    charts.forEach((chart) => chart.clear());
  }
  const quietly = message.type === "snapshot";
  device.apply(message.device, quietly);
  host.apply(message.host, quietly);
  if (message.host?.runs || message.host?.all) byId("host").hidden = false;
  if (quietly) [device, host].forEach((map) => map.repaint());
  deviceLegend(message.counts);
  hostLegend(message.host_counts);
  totals = message.totals ?? totals;
  if (message.points) charts.forEach((chart) => chart.add(message.points));
  if (message.requests) requests.show(message.requests);
  if (message.totals) requests.tally(totals);
  if (message.totals) ranks.show(totals.executor_rank_us);
  events.apply(message.events);
  if (message.totals) setLink(totals.executor_attached ? "live" : "waiting");
  if (message.points) inspector.refresh();
}

const LINK = { live: "live", lost: "disconnected, trying again", waiting: "no executor", connecting: "connecting" };
function setLink(name) {
  if (document.body.dataset.link !== name) tenants.follow(name === "live");
  document.body.dataset.link = name;
  if (byId("link-text").textContent !== LINK[name]) byId("link-text").textContent = LINK[name];
}

// A manager with an executor sends a message at once; without one it sends none.
let silence = 0;
new Stream("/api/stream", show, (connected) => {
  clearTimeout(silence);
  setLink(connected ? "connecting" : "lost");
  if (connected) silence = setTimeout(() => document.body.dataset.link === "connecting" && setLink("waiting"), SILENCE_MS);
});

// The parts of the page, for tests and for the browser's console.
window.pagekv = { device, host, ranks, requests, tenants, charts };
