// The page: one state, fed by one stream of messages; parts draw it.
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { Charts } from "./charts.js";
import { Fleet } from "./fleet.js";
import { Requests } from "./requests.js";
import { Worker } from "./worker.js";
import { clock, count, ms, named, percent } from "./format.js";

const KEPT_EVENTS = 300;

function Page() {
  const [first, setFirst] = useState(null);
  const [now, setNow] = useState(null);
  const [lost, setLost] = useState("");
  const [chosen, choose] = useState("");

  useEffect(() => {
    let source, ended = false;
    const events = new Map();
    let series = [];
    async function begin() {
      const response = await fetch("/ops/first");
      if (response.status === 401) { location.href = "/ops/login"; return; }
      const told = await response.json();
      series = told.series;
      setFirst(told);
      source = new EventSource("/ops/feed");
      source.addEventListener("full", () => setLost("Too many pages of this router are open."));
      source.onopen = () => setLost("");
      source.onerror = () => setLost("The router does not answer. This page continues when it does.");
      source.onmessage = message => {
        const told = JSON.parse(message.data);
        if (told.sample && (!series.length || told.sample[0] > series[series.length - 1][0])) {
          series.push(told.sample);
          if (series.length > 900) series.shift();
        }
        for (const event of told.events) events.set(event[0], event);
        while (events.size > KEPT_EVENTS) events.delete(events.keys().next().value);
        setNow({ ...told, series, events: [...events.values()].reverse() });
      };
    }
    begin().catch(() => { if (!ended) { setLost("The router does not answer."); setTimeout(() => location.reload(), 3000); } });
    return () => { ended = true; source?.close(); };
  }, []);

  if (!first || !now) return html`<header><h1>Baton</h1><span class="quiet">${lost || "loading"}</span></header>`;
  const workers = now.workers.map(row => named(first.columns, row));
  const sample = now.sample ? named(first.series_columns, now.sample) : {};
  const worker = workers.find(one => one.id === chosen);
  return html`
    <header>
      <h1>Baton</h1>
      <span>${first.about.model}</span>
      <span class="quiet">topic ${first.about.topic} · ${first.about.router} · ${first.about.version}</span>
      <span class="quiet" id="time">${sample.at ? clock(sample.at) : ""}</span>
    </header>
    ${lost && html`<section class="banner" role="alert">${lost}</section>`}
    ${now.scheduler && html`<section class="banner" role="alert">No scheduler answers; this router places from its last snapshot. ${now.scheduler}</section>`}
    <div class="column wide">
    <section><h2>Workers</h2><${Fleet} workers=${workers} flows=${now.flows} choose=${choose} /></section>
    <section><h2>Requests</h2><${Requests} at=${Math.floor((sample.at || 0) / 2)} /></section>
    </div>
    <div class="column">
    <section>
      <h2>Now</h2>
      <div class="tiles">
        <${Tile} name="first token p50" value=${ms(sample.ttft_p50_ms)} /><${Tile} name="first token p99" value=${ms(sample.ttft_p99_ms)} />
        <${Tile} name="token gap p50" value=${ms(sample.itl_p50_ms)} /><${Tile} name="token gap p99" value=${ms(sample.itl_p99_ms)} />
        <${Tile} name="requests/s" value=${count(sample.requests_per_s)} /><${Tile} name="running" value=${count(sample.live)} />
        <${Tile} name="waiting" value=${count(sample.waiting)} /><${Tile} name="output tokens/s" value=${count(sample.output_tokens_per_s)} />
        <${Tile} name="prefill tokens/s" value=${count(sample.prefill_tokens_per_s)} /><${Tile} name="drafts accepted" value=${percent(sample.acceptance)} />
      </div>
      <${Charts} columns=${first.series_columns} series=${now.series} at=${sample.at} />
    </section>
    <section><h2>Events</h2>
      <div class="scroll"><ol class="list" id="events">
        ${now.events.map(([number, at, severity, text]) => html`<li key=${number} class=${severity}><span class="quiet">${clock(at)}</span> ${text}</li>`)}
        ${!now.events.length && html`<li class="quiet">nothing has changed since this router started</li>`}
      </ol></div>
    </section>
    </div>
    ${worker && html`<${Worker} worker=${worker} forbidden=${first.about.forbidden} close=${() => choose("")} />`}
  `;
}

const Tile = ({ name, value }) => html`<div class="tile"><b>${value}</b><span>${name}</span></div>`;

render(html`<${Page} />`, document.getElementById("page"));
