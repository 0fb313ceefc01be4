// Elements without markup: text is always text.

export const $ = (id) => document.getElementById(id);

/** An element with properties, attributes (`aria-*`, `data-*`, …), listeners (`on*`) and children. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${n.toFixed(unit && n < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

export const count = (n) => Math.round(n).toLocaleString("en");

/** A number in a few digits. */
export const short = (n) => (n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2));

/** Offers a text as a file. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
