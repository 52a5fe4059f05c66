/**
 * Elements without markup: every text goes through `textContent`, so that nothing that a prompt,
 * a file name or an error says can become markup.
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Element by its id. The page has it, or the page is broken.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found;
}

/**
 * Make an element. `props`: `on` holds listeners, `vars` CSS variables; names with a dash, `role`,
 * `for` and `list` are attributes, all others are properties.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {any}
 */
export function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "on") {
      for (const [type, listen] of Object.entries(value)) element.addEventListener(type, listen);
    } else if (name === "vars") {
      for (const [key, each] of Object.entries(value)) element.style.setProperty(key, String(each));
    } else if (name.includes("-") || ["role", "for", "list"].includes(name)) {
      element.setAttribute(name, String(value));
    } else {
      /** @type {any} */ (element)[name] = value;
    }
  }
  element.append(...children.filter(isShown).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** @param {any} child */
function isShown(child) {
  return child !== null && child !== undefined && child !== false && child !== "";
}

/**
 * Icon of the sprite in index.html; a label beside it or `aria-label` names the button.
 * @param {string} name
 */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/**
 * Button with an icon; with `isBare` the label is for screen readers and the pointer alone.
 * @param {string} label
 * @param {string} iconName
 * @param {(event: Event) => void} onClick
 * @param {{isBare?: boolean, kind?: string}} [look]
 */
export function button(label, iconName, onClick, { isBare = false, kind = "" } = {}) {
  return make(
    "button",
    {
      type: "button",
      className: [kind, isBare ? "bare" : ""].join(" ").trim(),
      title: isBare ? label : undefined,
      "aria-label": isBare ? label : undefined,
      on: { click: onClick },
    },
    icon(iconName),
    !isBare && label,
  );
}

/**
 * Bring the children of `parent` to `items`, in order; elements whose key stays are updated in
 * place, so that focus and playing videos stay.
 * @template T
 * @param {HTMLElement} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => HTMLElement & {update?: (item: T) => void}} create
 */
export function reconcile(parent, items, keyOf, create) {
  const old = new Map([...parent.children].map((child) => [child.getAttribute("data-key"), child]));
  /** @type {Element | null} */
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = /** @type {any} */ (old.get(key));
    old.delete(key);
    if (!child) {
      child = create(item);
      child.setAttribute("data-key", key);
    }
    child.update?.(item);
    if (child === place) place = place?.nextElementSibling ?? null;
    else parent.insertBefore(child, place);
  }
  for (const gone of old.values()) gone.remove();
}

/**
 * Set the text where it differs: a screen reader need not hear the same again.
 * @param {HTMLElement} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
