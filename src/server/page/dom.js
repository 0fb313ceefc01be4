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

/** What a browser keeps for this tab (`sessionStorage`) or for all (`localStorage`), if it keeps anything. */
export function saved(where, name, value) {
  try {
    if (value === undefined) return self[where].getItem(name) ?? "";
    if (value) self[where].setItem(name, value);
    else self[where].removeItem(name);
  } catch {
    // Cookies are blocked.
  }
  return value ?? "";
}

/** Copies a text; whether it was copied. Pages without a secure context have only the old way. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const before = document.activeElement;
    const area = h("textarea", { class: "outside", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const is = document.execCommand("copy");
    area.remove();
    before?.focus();
    return is;
  }
}

/** A button that copies what `text` returns, and says whether it did. */
export function copyButton(props, text) {
  const button = h("button", { type: "button", class: "small", "aria-live": "polite", ...props }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

const works = new WeakMap();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting) continue;
    watcher.unobserve(target);
    works.get(target)();
  }
});

/** Does a work once an element can be seen. */
export function whenSeen(element, work) {
  works.set(element, work);
  watcher.observe(element);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) [n, unit] = [n / 1024, unit + 1];
  return `${n.toFixed(unit && n < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

/** How large a text is as a file. */
export const sizeOf = (text) => bytes(new Blob([text]).size);

export const count = (n) => Math.round(n).toLocaleString("en");

/** A number in a few digits. */
export const short = (n) => (n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2));

/** Offers a text as a file. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
