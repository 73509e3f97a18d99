// One worker: what it is doing, and what an operator can do with it. Every action has to be confirmed.
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { count, percent } from "./format.js";

export function Worker({ worker, forbidden, close }) {
  const dialog = useRef();
  const [asked, ask] = useState(null);
  const [said, say] = useState("");
  useEffect(() => { dialog.current.showModal(); }, []);
  const others = worker.kept ? [] : ["prefill", "decode", "mixed"].filter(role => role !== worker.role);
  const actions = [
    worker.state === "drained" || worker.state === "draining" ? ["undrain", "", "take requests again"] : ["drain", "", "drain: finish what it has, then exit"],
    ...others.map(role => ["role", role, `become a ${role} worker`]),
  ];
  async function act([action, role, words]) {
    ask(null);
    const body = JSON.stringify({ action, role, worker: worker.id, confirm: worker.id });
    const response = await fetch("/ops/actions", { method: "POST", body, headers: { "content-type": "application/json", "x-baton-ops": "1" } });
    const told = await response.json().catch(() => ({}));
    say(told.done || told.error?.message || `${words}: HTTP ${response.status}`);
  }
  return html`<dialog ref=${dialog} onClose=${close} id="worker">
    <div class="bar"><h2>${worker.name}</h2><button onClick=${() => dialog.current.close()}>close</button></div>
    <dl>
      <dt>id</dt><dd>${worker.id} at ${worker.address}</dd>
      <dt>role, state</dt><dd>${worker.role}, ${worker.state}; last heartbeat ${worker.silent_s} s ago</dd>
      ${worker.gang && html`<dt>gang</dt><dd>${worker.gang}</dd>`}
      <dt>requests</dt><dd>${worker.running} of ${worker.slots} slots running, ${worker.waiting} waiting</dd>
      <dt>${worker.kept ? "encode" : "prefill"}</dt><dd>${count(worker.prefill_tokens_per_s)} tokens/s, ${count(worker.queued_tokens)} queued</dd>
      ${worker.kept ? html`<dt>embeddings</dt><dd>${count(worker.kept[0])} images in ${worker.kept[1]} MiB; ${count(worker.kept[2])} computed, ${count(worker.kept[3])} found here again</dd>` : html`
      <dt>output</dt><dd>${count(worker.output_tokens_per_s)} tokens/s</dd>
      <dt>KV cache</dt><dd>${percent(worker.kv_usage)} in use; ${worker.pinned_mib} MiB saved for others</dd>`}
      ${worker.method && html`<dt>drafts</dt><dd>${worker.method}: first position ${percent(worker.acceptance)} accepted, ${worker.accepted_length ?? "–"} tokens a step${worker.alarm ? html` <b class="bad">too few</b>` : ""}</dd>`}
    </dl>
    ${forbidden ? html`<p class="quiet">${forbidden}</p>` : html`
      <div class="bar">${actions.map(one => html`<button class="danger" onClick=${() => ask(one)}>${one[0] === "role" ? `make it ${one[1]}` : one[0]}</button>`)}</div>
      ${asked && html`<div class="bar" role="alertdialog"><span>${worker.name}: ${asked[2]}?</span><button class="danger" id="confirm" onClick=${() => act(asked)}>Yes</button><button onClick=${() => ask(null)}>No</button></div>`}`}
    ${said && html`<p role="status" id="said">${said}</p>`}
  </dialog>`;
}
