// The page at `/`: a chat, a completion playground, and what the server is doing.

import { startChat, stopChat } from "./chat.js";
import { startCompletion, stopCompletion } from "./completion.js";
import { find } from "./dom.js";
import { showRoutes } from "./routes.js";
import { keepPolling, poll } from "./status.js";
import { showTimeline } from "./timeline.js";

const KEY_ITEM = "serve-llm.api-key";
const TABS = ["chat", "completion", "status", "api"];

function select(name) {
  for (const tab of TABS) {
    const isSelected = tab === name;
    find(`${tab}-tab`).setAttribute("aria-selected", String(isSelected));
    find(`${tab}-tab`).tabIndex = isSelected ? 0 : -1;
    find(`${tab}-panel`).hidden = !isSelected;
  }
  find("settings").hidden = name === "status" || name === "api";
  if (name === "api") {
    showRoutes();
  } else if (name === "status") {
    showTimeline().catch(() => {}); // the next poll tells what is wrong
  }
}

function selectByAddress() {
  const name = location.hash.slice(1);
  select(TABS.includes(name) ? name : TABS[0]);
}

function startTabs() {
  TABS.forEach((name, index) => {
    find(`${name}-tab`).addEventListener("click", () => {
      location.hash = name;
    });
    find(`${name}-tab`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: TABS.length - 1 }[event.key];
      if (step !== undefined) {
        const next = TABS[(index + step) % TABS.length];
        location.hash = next;
        find(`${next}-tab`).focus();
      }
    });
  });
  addEventListener("hashchange", selectByAddress);
  selectByAddress();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    stopChat();
    stopCompletion();
  }
});
find("api-key").value = sessionStorage.getItem(KEY_ITEM) ?? "";
find("key").hidden = !find("api-key").value; // until the server asks for a key
find("api-key").addEventListener("change", () => {
  sessionStorage.setItem(KEY_ITEM, find("api-key").value.trim());
  poll();
});
startTabs();
startChat();
startCompletion();
keepPolling();
