// The last quarter of an hour, five small charts. uPlot draws them, with new data every second.
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const CHARTS = [
  ["first token, ms", [["ttft_p50_ms", "p50", "--prefill"], ["ttft_p99_ms", "p99", "--bad"]]],
  ["gap between tokens, ms", [["itl_p50_ms", "p50", "--decode"], ["itl_p99_ms", "p99", "--bad"]]],
  ["tokens/s", [["output_tokens_per_s", "output", "--decode"], ["prefill_tokens_per_s", "prefill", "--prefill"]]],
  ["requests", [["live", "running", "--decode"], ["waiting", "waiting", "--warning"]]],
  ["drafts accepted", [["acceptance", "first position", "--mixed"]]],
];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);

export const Charts = ({ columns, series, at }) => html`<div class="charts">
  ${CHARTS.map(([title, lines]) => html`<${Chart} key=${title} title=${title} lines=${lines} columns=${columns} series=${series} at=${at} />`)}
</div>`;

function Chart({ title, lines, columns, series, at }) {
  const place = useRef(), plot = useRef();
  const data = () => [columns.indexOf("at"), ...lines.map(line => columns.indexOf(line[0]))].map(index => series.map(sample => sample[index]));
  useEffect(() => {
    const size = () => ({ width: place.current.clientWidth, height: 110 });
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    plot.current = new uPlot({
      ...size(), legend: { show: false }, cursor: { show: false },
      scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 1e-6) * 1.1] } },
      axes: [{ ...axis, size: 22 }, { ...axis, size: 44 }],
      series: [{}, ...lines.map(([, label, name]) => ({ label, stroke: colour(name), width: 1.5, points: { show: false } }))],
    }, data(), place.current);
    const watcher = new ResizeObserver(() => plot.current.setSize(size()));
    watcher.observe(place.current);
    return () => { watcher.disconnect(); plot.current.destroy(); };
  }, []);
  useEffect(() => { plot.current?.setData(data()); }, [at]);
  return html`<div class="chart"><h3>${title} ${lines.map(([, label, name]) => html`<span style="color: var(${name})"> ${label}</span>`)}</h3><div ref=${place} /></div>`;
}
