// The fleet as a picture: prefill and encode on the left, decode on the right, KV between them. Many workers become dots.
import { html, useState } from "./vendor/preact-htm.js";
import { COLOURS, count, percent } from "./format.js";

const MOST_BOXES = 12; // per side; more workers are drawn as dots
const BOX = { width: 210, height: 46, gap: 10 };
const WIDTH = 760;

export function Fleet({ workers, flows, choose }) {
  const [search, setSearch] = useState("");
  const found = search ? workers.filter(one => one.id.includes(search) || one.state.includes(search) || one.role === search) : workers;
  const of = role => found.filter(one => one.role === role);
  const sides = { prefill: of("prefill"), encode: of("encode"), decode: found.filter(one => one.role !== "prefill" && one.role !== "encode") };
  const many = Math.max(sides.prefill.length + sides.encode.length, sides.decode.length) > MOST_BOXES;
  return html`
    <div class="bar">
      <input type="search" placeholder="search workers" aria-label="search workers" value=${search} onInput=${event => setSearch(event.target.value)} />
      <span class="quiet">${summary(workers)}</span>
    </div>
    ${many ? html`<${Dots} sides=${sides} flows=${flows} choose=${choose} />` : html`<${Boxes} sides=${sides} flows=${flows} choose=${choose} />`}
    ${!workers.length && html`<p class="bad">No worker is registered.</p>`}
  `;
}

function summary(workers) {
  const states = {};
  for (const one of workers) { const key = `${one.role} ${one.state}`; states[key] = (states[key] || 0) + 1; }
  return Object.entries(states).map(([key, number]) => `${number} ${key}`).join(" · ");
}

const fullness = one => one.role === "prefill" || one.kept ? Math.min(1, one.queued_tokens / 8192) : one.slots ? Math.min(1, one.running / one.slots) : 0;

const held = one => one.kept ? `${count(one.kept[1])} MiB` : `KV ${percent(one.kv_usage)}`;

function Boxes({ sides, flows, choose }) {
  const left = [...sides.prefill, ...sides.encode], right = sides.decode;
  const rows = Math.max(left.length, right.length, 1);
  const height = rows * (BOX.height + BOX.gap) + 8;
  const place = new Map();
  for (const [side, x] of [[left, 4], [right, WIDTH - BOX.width - 4]]) {
    const top = (height - side.length * (BOX.height + BOX.gap)) / 2;
    side.forEach((one, index) => place.set(one.id, { x, y: top + index * (BOX.height + BOX.gap) }));
  }
  const busiest = Math.max(...flows.map(flow => flow[2]), 0.1);
  return html`<svg class="flow" viewBox="0 0 ${WIDTH} ${height}" role="group" aria-label="workers and the KV between them">
    ${flows.filter(([from, to]) => from !== to && place.has(from) && place.has(to)).map(flow => html`<${Link} key=${flow[0] + flow[1]} flow=${flow} place=${place} busiest=${busiest} />`)}
    ${[...left, ...right].map(one => html`<${Box} key=${one.id} worker=${one} at=${place.get(one.id)} choose=${choose} />`)}
  </svg>`;
}

function Link({ flow: [from, to, requests, mib], place, busiest }) {
  const a = place.get(from), b = place.get(to);
  const x1 = a.x < b.x ? a.x + BOX.width : a.x, x2 = a.x < b.x ? b.x : b.x + BOX.width;
  const y1 = a.y + BOX.height / 2, y2 = b.y + BOX.height / 2, middle = (x1 + x2) / 2;
  return html`<g>
    <path class="link" d="M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}" stroke-width=${1 + 7 * requests / busiest} />
    <text class="small" x=${middle} y=${(y1 + y2) / 2 - 6} text-anchor="middle">${count(requests)} req/s · ${count(mib)} MiB/s</text>
  </g>`;
}

function Box({ worker, at, choose }) {
  const colour = COLOURS[worker.role];
  const work = worker.role === "prefill" || worker.kept ? `${count(worker.prefill_tokens_per_s)} tok/s · queue ${count(worker.queued_tokens)}` : `${worker.running}/${worker.slots} · ${count(worker.output_tokens_per_s)} tok/s`;
  const key = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(worker.id); } };
  return html`<g class="worker ${worker.state}" tabindex="0" role="button" aria-label="${worker.name}: ${worker.role}, ${worker.state}" data-worker=${worker.id}
      transform="translate(${at.x},${at.y})" onClick=${() => choose(worker.id)} onKeyDown=${key}>
    <rect class="box" width=${BOX.width} height=${BOX.height} rx="7" stroke=${worker.alarm ? "var(--bad)" : colour} />
    <rect class="load" width=${BOX.width * fullness(worker)} height=${BOX.height} rx="7" fill=${colour} />
    <text x="9" y="19">${worker.name.slice(0, 24)}${worker.state === "ready" ? "" : ` (${worker.state})`}</text>
    <text x="9" y="37" class="small">${work} · ${held(worker)}</text>
  </g>`;
}

function Dots({ sides, flows, choose }) {
  const total = flows.reduce((sum, flow) => [sum[0] + flow[2], sum[1] + flow[3]], [0, 0]);
  return html`
    ${["prefill", "encode", "decode"].filter(side => side !== "encode" || sides.encode.length).map(side => html`
      <h3 class="quiet">${side}: ${sides[side].length}</h3>
      <div class="dots">${sides[side].map(one => html`<${Dot} key=${one.id} worker=${one} choose=${choose} />`)}</div>`)}
    <p class="quiet">between prefill and decode: ${count(total[0])} requests/s, ${count(total[1])} MiB/s</p>`;
}

function Dot({ worker, choose }) {
  const share = Math.round(15 + 85 * fullness(worker));
  const title = `${worker.name}: ${worker.role}, ${worker.state}, ${worker.running}/${worker.slots} running, ${held(worker)}`;
  return html`<button class="dot ${worker.state} ${worker.alarm ? "alarm" : ""}" title=${title} aria-label=${title} data-worker=${worker.id}
    style="background: color-mix(in srgb, ${COLOURS[worker.role]} ${share}%, transparent)" onClick=${() => choose(worker.id)} />`;
}
