/** Light, dark, or as the system has it. */

import { byId, icon } from "./dom.js";

const KEY = "everyframe.theme";
const THEMES = [
  { name: "", label: "Colours as the system has them", icon: "auto" },
  { name: "light", label: "Light colours", icon: "sun" },
  { name: "dark", label: "Dark colours", icon: "moon" },
];

/** Apply the chosen theme; the button goes to the next. */
export function useTheme() {
  const button = byId("theme");
  let place = Math.max(0, THEMES.findIndex((theme) => theme.name === (localStorage.getItem(KEY) ?? "")));
  const apply = () => {
    const theme = THEMES[place];
    document.documentElement.dataset.theme = theme.name;
    button.replaceChildren(icon(theme.icon));
    button.title = theme.label;
    button.setAttribute("aria-label", `Theme: ${theme.label.toLowerCase()}`);
  };
  button.addEventListener("click", () => {
    place = (place + 1) % THEMES.length;
    localStorage.setItem(KEY, THEMES[place].name);
    apply();
  });
  apply();
}
