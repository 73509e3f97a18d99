// Numbers and rows as people read them.
export const ms = value => value == null ? "–" : value < 10 ? value.toFixed(1) + " ms" : value < 10000 ? Math.round(value) + " ms" : (value / 1000).toFixed(1) + " s";
export const count = value => value == null ? "–" : value < 100 ? String(Math.round(value * 10) / 10) : Math.round(value).toLocaleString("en");
export const percent = value => value == null ? "–" : Math.round(100 * value) + " %";
export const clock = seconds => new Date(seconds * 1000).toLocaleTimeString("en-GB");
// Rows are arrays; the names of their columns are sent once.
export const named = (columns, row) => Object.fromEntries(columns.map((name, index) => [name, row[index]]));
export const COLOURS = { prefill: "var(--prefill)", decode: "var(--decode)", mixed: "var(--mixed)", encode: "var(--encode)" };
