"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const said = (value) => Number(value.toPrecision(4)).toString().replace("-", "\u2212");
  document.documentElement.classList.add("js");

  // Which rollouts are shown.
  const checked = (name) => document.querySelector(`input[name="${name}"]:checked`);
  const showShelf = () => {
    const choice = checked("shelf");
    for (const shelf of all(".shelf")) shelf.hidden = choice !== null && shelf.dataset.shelf !== choice.value;
  };

  // What each token is colored by.
  const boxes = all(".tokens");
  const numbers = (box, key) => {
    const text = box.dataset[key];
    const count = box.getElementsByTagName("i").length;
    if (text === undefined) return null;
    if (key === "trust") return [...text];
    const parts = text.split(" ");
    return parts.length === 1 ? Array(count).fill(parts[0]) : parts;
  };
  const measure = { ratio: (r) => Math.log(r) };
  const largest = (key) => {
    let most = 0;
    for (const box of boxes)
      for (const part of (box.dataset[key] || "").split(" "))
        if (part !== "") most = Math.max(most, Math.abs((measure[key] || Number)(Number(part))));
    return most;
  };
  const LETTERS = { x: "stop", "-": "less", "+": "more", "0": "none", " ": "none" };
  const LEAST = { ratio: 0.02, surprise: 5, entropy: 0.1, advantage: 1e-9, value: 1e-9 };
  const paint = () => {
    const choice = checked("color");
    if (choice === null) return;
    const key = choice.value;
    const most = key === "surprise" ? 5 : Math.max(LEAST[key] || 0, key === "trust" ? 1 : largest(key));
    const note = document.querySelector(".legend");
    note.textContent = choice.dataset.meaning + (key === "trust" ? "" : ` Full color at ${said(key === "ratio" ? Math.exp(most) : most)}.`);
    for (const box of boxes) {
      const values = numbers(box, key);
      const tokens = box.getElementsByTagName("i");
      for (let n = 0; n < tokens.length; n++) {
        const token = tokens[n], value = values === null ? "" : values[n];
        token.className = token.classList.contains("on") ? "on" : "";
        if (value === "" || value === undefined) { token.style.removeProperty("--a"); continue; }
        if (key === "trust") {
          const name = LETTERS[value];
          if (name) token.classList.add(name);
          token.style.setProperty("--a", name && name !== "none" ? 0.35 : 0);
          continue;
        }
        const size = (measure[key] || Number)(Number(value)) / most;
        token.classList.add(key === "surprise" || key === "entropy" ? "heat" : size < 0 ? "down" : "up");
        token.style.setProperty("--a", (0.55 * Math.min(1, Math.abs(size))).toFixed(3));
      }
    }
  };
  for (const input of all('input[name="shelf"]')) input.addEventListener("change", showShelf);
  for (const input of all('input[name="color"]')) input.addEventListener("change", paint);

  // What is known of one token.
  const TRUST = { ".": "pushed as its ratio says", x: "stopped", "-": "held back", "+": "pushed more", "0": "no advantage", " ": "not trained" };
  const NAMES = { advantage: "advantage", surprise: "surprise", entropy: "entropy", ratio: "ratio", value: "value", trust: "trust" };
  const look = (box, place) => {
    const tokens = box.getElementsByTagName("i");
    if (place < 0 || place >= tokens.length) return;
    for (const token of all(".on", box)) token.classList.remove("on");
    tokens[place].classList.add("on");
    box.dataset.place = place;
    const facts = [];
    for (const key in NAMES) {
      const values = numbers(box, key);
      if (values && values[place] !== "" && values[place] !== undefined)
        facts.push(key === "trust" ? TRUST[values[place]] : `${NAMES[key]} ${values[place]}`);
    }
    const known = facts.length ? facts.join(", ") : "nothing is known of it: the policy did not choose it";
    box.nextElementSibling.textContent = `${JSON.stringify(tokens[place].textContent)}: ${known}`;
  };
  const KEYS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  const moved = (place, key, count) => Math.min(count - 1, Math.max(0, place + KEYS[key]));
  for (const box of boxes) {
    const count = box.getElementsByTagName("i").length;
    box.addEventListener("pointerover", (event) => {
      if (event.target.tagName === "I") look(box, [...box.getElementsByTagName("i")].indexOf(event.target));
    });
    box.addEventListener("focus", () => look(box, Number(box.dataset.place || 0)));
    box.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      look(box, moved(Number(box.dataset.place || 0), event.key, count));
      const token = box.querySelector(".on");
      if (token) token.scrollIntoView({ block: "nearest" });
    });
  }

  // What a curve says at one place.
  for (const picture of all(".picture")) {
    const svg = picture.querySelector("svg");
    const [left, right, low, high] = svg.dataset.range.split(" ").map(Number);
    const [x0, y0, x1, y1] = svg.dataset.frame.split(" ").map(Number);
    const curves = all(".curve", svg).map((path) => ({
      name: path.querySelector("title").textContent,
      points: path.getAttribute("d").split(/[ML]/).filter(Boolean).map((pair) => pair.split(" ").map(Number)),
    }));
    const places = [...new Set(curves.flatMap((curve) => curve.points.map((point) => point[0])))].sort((a, b) => a - b);
    if (places.length === 0) continue;
    let at = places.length;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("class", "cursor");
    const reading = picture.parentElement.querySelector(".reading");
    const show = (place) => {
      at = Math.min(places.length - 1, Math.max(0, place));
      const x = places[at];
      line.setAttribute("d", `M${x} ${y0}V${y1}`);
      svg.append(line);
      const facts = curves.map((curve) => {
        const near = curve.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
        if (Math.abs(near[0] - x) > 4) return "";
        return `${curve.name} ${said(low + ((near[1] - y1) / (y0 - y1)) * (high - low))}`;
      });
      const where = left + ((x - x0) / (x1 - x0)) * (right - left);
      const whole = right - left >= places.length - 1 ? Math.round(where) : Number(where.toPrecision(4));
      reading.textContent = `${svg.dataset.across} ${whole}: ${facts.filter(Boolean).join(", ")}`;
    };
    picture.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let best = 0;
      places.forEach((place, n) => { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = n; });
      show(best);
    });
    picture.addEventListener("focus", () => show(at));
    picture.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(moved(at, event.key, places.length));
    });
  }

  // On paper everything is open.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const one of closed) one.open = true;
    for (const shelf of all(".shelf")) shelf.hidden = false;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; showShelf(); });
  showShelf();
  paint();
})();
