// The last and the slowest requests, and one of them as a waterfall across processes.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { clock, ms } from "./format.js";

export function Requests({ at }) {
  const [order, setOrder] = useState("last");
  const [search, setSearch] = useState("");
  const [rows, setRows] = useState([]);
  const [shown, show] = useState(null);
  useEffect(() => {
    const gone = new AbortController();
    fetch(`/ops/requests?order=${order}&n=50&search=${encodeURIComponent(search)}`, { signal: gone.signal })
      .then(response => response.ok ? response.json() : []).then(setRows).catch(() => {});
    return () => gone.abort();
  }, [order, search, at]);
  return html`
    <div class="bar">
      ${["last", "slowest"].map(one => html`<button class=${order === one ? "on" : ""} aria-pressed=${order === one} onClick=${() => setOrder(one)}>${one}</button>`)}
      <input type="search" placeholder="id, worker, tenant, outcome" aria-label="search requests" value=${search} onInput=${event => setSearch(event.target.value)} />
    </div>
    <div class="scroll"><table id="requests">
      <thead><tr><th>ended</th><th>request</th><th>outcome</th><th class="number">prompt</th><th class="number">output</th><th class="number">first token</th><th class="number">in all</th><th class="number">attempts</th><th>decode worker</th></tr></thead>
      <tbody>${rows.map(one => html`<${Row} key=${one.request_id} request=${one} show=${show} />`)}</tbody>
    </table>${!rows.length && html`<p class="quiet">none</p>`}</div>
    ${shown && html`<${Details} request=${shown} close=${() => show(null)} />`}`;
}

function Row({ request, show }) {
  const last = request.attempts[request.attempts.length - 1];
  const severity = request.outcome === "error" ? "bad" : request.attempts.length > 1 ? "warning" : "";
  return html`<tr tabindex="0" class=${severity} data-request=${request.request_id} onClick=${() => show(request)} onKeyDown=${event => event.key === "Enter" && show(request)}>
    <td>${clock(request.arrived_at + request.duration_ms / 1000)}</td><td title=${request.request_id}>${request.request_id.slice(0, 22)}</td><td>${request.outcome}</td>
    <td class="number">${request.prompt_tokens}</td><td class="number">${request.output_tokens}</td><td class="number">${request.ttft_ms ? ms(request.ttft_ms) : "–"}</td>
    <td class="number">${ms(request.duration_ms)}</td><td class="number">${request.attempts.length}</td><td>${last ? last.decode_worker : ""}</td></tr>`;
}

function Details({ request, close }) {
  const dialog = useRef();
  useEffect(() => { dialog.current.showModal(); }, []);
  const whole = Math.max(request.duration_ms, ...request.stages.map(stage => stage.at_ms + stage.ms), 1e-3);
  const stages = [...request.stages].sort((one, other) => one.at_ms - other.at_ms);
  return html`<dialog ref=${dialog} onClose=${close} id="waterfall">
    <div class="bar"><h2>${request.request_id}</h2><button onClick=${() => dialog.current.close()}>close</button></div>
    <dl>
      <dt>outcome</dt><dd>${request.outcome}${request.status ? `, HTTP ${request.status}` : ""}</dd>
      <dt>tokens</dt><dd>${request.prompt_tokens} of the prompt, ${request.output_tokens} of output</dd>
      <dt>first token</dt><dd>${request.ttft_ms ? ms(request.ttft_ms) : "none"} of ${ms(request.duration_ms)}</dd>
      ${request.drafts.method && html`<dt>drafts</dt><dd>${request.drafts.method}: ${request.drafts.accepted_tokens} of ${request.drafts.drafted_tokens} drafted tokens accepted in ${request.drafts.steps} steps</dd>`}
      <dt>attempts</dt><dd>${request.attempts.map(one => html`<div>${one.number}: ${one.prefill_worker || "–"} → ${one.decode_worker}${one.trouble ? html` <span class="bad">${one.trouble}</span>` : ""}</div>`)}</dd>
      ${request.trace_id && html`<dt>trace</dt><dd>${request.trace_id}</dd>`}
      ${request.tenant && html`<dt>tenant</dt><dd>${request.tenant}</dd>`}
    </dl>
    <div class="fall" role="list">${stages.map((stage, index) => html`<${Stage} key=${index} stage=${stage} whole=${whole} events=${request.events} />`)}</div>
    ${request.events.length > 0 && html`<ol class="list">${request.events.map(event => html`<li class="warning">${ms(event.at_ms)}: ${event.name}, attempt ${event.attempt}: ${event.attributes.message || event.attributes.trouble || ""}</li>`)}</ol>`}
  </dialog>`;
}

function Stage({ stage, whole, events }) {
  const where = stage.worker || stage.service.replace("baton-", "");
  const left = 100 * Math.max(0, stage.at_ms) / whole, width = 100 * stage.ms / whole;
  const title = `${stage.name} at ${ms(stage.at_ms)} for ${ms(stage.ms)}, ${where}${Object.entries(stage.attributes).map(([key, value]) => `, ${key} ${value}`).join("")}`;
  return html`<div class="row" role="listitem" title=${title}>
    <span class="name">${stage.within ? "  " : ""}${stage.name} <span class="quiet">${where}</span></span>
    <span class="track"><span class="stage c-${stage.service}" style="left:${left}%;width:${width}%" />
      ${events.map(event => html`<span class="mark" style="left:${100 * event.at_ms / whole}%" />`)}</span>
    <span class="time">${ms(stage.ms)}</span></div>`;
}
