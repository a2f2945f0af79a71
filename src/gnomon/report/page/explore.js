"use strict";
// The form's fields come from the server's options; each change asks it once more, the last answer wins.
const told = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const inputs = new Map();
let plan = "", asked = 0, timer = 0, latest = null;

function make(field) {
  const label = document.createElement("label");
  label.title = field.help;
  let input;
  if (field.kind === "choice") {
    input = document.createElement("select");
    for (const choice of ["", ...field.choices]) {
      const option = document.createElement("option");
      option.value = choice;
      option.textContent = choice || "–";
      input.append(option);
    }
  } else {
    input = document.createElement("input");
    input.type = field.kind === "switch" ? "checkbox" : "text";
    if (field.choices.length) {
      const list = document.createElement("datalist");
      list.id = "list-" + field.label.replaceAll(" ", "-");
      for (const choice of field.choices) list.append(new Option(choice, choice));
      label.append(list);
      input.setAttribute("list", list.id);
    }
  }
  if (field.kind === "switch") { label.className = "switch"; label.append(input, field.label); }
  else label.append(field.label, input);
  if (field.of) label.dataset.of = field.of;
  input.addEventListener("input", field.flag === "--serve" ? () => { turn(); later(); } : later);
  inputs.set(field.flag, [field, input]);
  $(field.shown ? "shown" : "more").append(label);
}

// A job that trains, or a server: options of the other are hidden, and not sent.
const serves = () => inputs.get("--serve")[1].checked;
const asked_for = (field) => !field.of || field.of === (serves() ? "serving" : "training");

function turn() {
  for (const [field, input] of inputs.values()) input.closest("label").hidden = !asked_for(field);
  $("fit").textContent = serves() ? "Make it start" : "Make it fit";
}

function words() {
  const out = [];
  for (const [flag, [field, input]] of inputs) {
    if (!asked_for(field)) continue;
    if (field.kind === "switch") { if (input.checked) out.push(flag); continue; }
    const text = input.value.trim();
    if (!text) continue;
    if (flag === "") out.unshift(text); else out.push(flag, text);
  }
  return out;
}

function fill(state) {
  for (const [field, input] of inputs.values()) {
    if (field.kind === "switch") input.checked = false; else input.value = "";
  }
  const rest = [...state.words];
  while (rest.length) {
    const word = rest.shift();
    const found = inputs.get(word.startsWith("--") ? word : "");
    if (!found) continue;
    const [field, input] = found;
    if (field.kind === "switch") input.checked = true;
    else input.value = word.startsWith("--") ? rest.shift() ?? "" : word;
  }
  plan = state.plan || "";
  $("from-plan").hidden = !plan;
  turn();
}

// A way that is some options: each is filled in, and one that is empty is left out.
function set(values) {
  for (const [flag, value] of Object.entries(values)) inputs.get(flag)[1].value = value;
}

async function ask(path, body) {
  const answer = await fetch(path, {
    method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", "X-Gnomon-Token": told.token },
  });
  return answer.json();
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(predict, 90);
}

async function predict() {
  const state = { words: words(), plan }, mine = ++asked, began = performance.now();
  document.querySelector("main").classList.add("stale");
  let answer;
  try { answer = await ask("predict", state); }
  catch { answer = { error: "the server does not answer; is gnomon explore still running?" }; }
  if (mine !== asked) return;
  document.querySelector("main").classList.remove("stale");
  $("status").textContent = `answered in ${Math.round(performance.now() - began)} ms`;
  $("error").textContent = answer.error || "";
  $("ways").replaceChildren();
  if (answer.error) { latest = null; $("verdict").textContent = ""; return; }
  latest = answer;
  history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(state)));
  $("sentence").textContent = answer.sentence;
  $("verdict").textContent = answer.verdict;
  $("verdict").className = "verdict " + (answer.fits ? "good" : "bad");
  $("command").textContent = answer.command;
  $("title").textContent = answer.title;
  $("plan-line").textContent = answer.plan_line;
  const cards = answer.cards.map(([name, text, band]) => {
    const card = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = name; dd.textContent = text; card.append(dt, dd);
    if (band) {
      const within = document.createElement("dd");
      within.className = "measured"; within.textContent = band; card.append(within);
    }
    return card;
  });
  $("cards").replaceChildren(...cards);
  $("page").srcdoc = answer.page;
}

async function offer(path, button, none) {
  $("status").textContent = "searching …";
  button.disabled = true;
  let answer;
  try { answer = await ask(path, { words: words(), plan }); } catch { answer = { error: "the server does not answer" }; }
  button.disabled = false;
  $("error").textContent = answer.error || "";
  $("status").textContent = answer.ways && !answer.ways.length ? none : "";
  const rows = (answer.ways || []).map((way) => {
    const row = document.createElement("li"), take = document.createElement("button");
    row.textContent = way.text;
    take.type = "button"; take.textContent = "take it";
    take.addEventListener("click", () => {
      if (way.set) set(way.set); else fill({ words: [], plan: way.plan });
      predict();
    });
    row.append(take);
    return row;
  });
  $("ways").replaceChildren(...rows);
}

$("fit").addEventListener("click", (e) => offer("fit", e.target, "it fits already, or nothing that is known makes it fit"));
$("best").addEventListener("click", (e) => offer("best", e.target, "no plan fits"));
$("drop").addEventListener("click", () => { plan = ""; $("from-plan").hidden = true; fill(told.state); predict(); });
$("save").addEventListener("click", () => {
  if (!latest) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([latest.plan], { type: "application/toml" }));
  link.download = latest.file;
  link.click();
  URL.revokeObjectURL(link.href);
});
$("link").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(location.href); $("status").textContent = "copied"; }
  catch { $("status").textContent = location.href; }
});
$("form").addEventListener("submit", (e) => e.preventDefault());

told.fields.forEach(make);
let state = told.state;
if (location.hash.length > 1) {
  try { state = { words: [], plan: "", ...JSON.parse(decodeURIComponent(location.hash.slice(1))) }; } catch { /* not ours */ }
}
fill(state);
predict();
