"use strict";
// What is shown is a function of (program, frame) alone: going back shows the same picture as going there.

let DATA, beatMs = 3500;
const $ = (id) => document.getElementById(id);
const WORDS = {
  gradient: "own gradient", share: "gradient ÷ d", average: "average", old: "old parameter", new: "new parameter",
  stale: "stale parameter", moment: "moment", zero: "zero", padding: "padding", unset: "not written",
  mixture: "nonsense", garbage: "garbage", freed: "released",
};
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const isNarrow = () => window.innerWidth < 800;
const escape = (text) => `${text}`.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const total = (numbers) => numbers.reduce((sum, one) => sum + one, 0);
const mean = (numbers) => Math.round(total(numbers) / numbers.length);
const last = (list) => list[list.length - 1];
const clamp = (n, most) => Math.max(0, Math.min(most, n));
const isAlive = (cells) => Boolean(cells) && cells[0].kind !== "freed";

// ------------------------------------------------------------------------------------------------ recordings

class Player {
  /** A recording, its frames made whole: of each, the cells of each storage, {value, kind, element, origin, by}. */
  constructor(recording) {
    Object.assign(this, recording);
    this.param = this.params.flatMap((n, p) => Array(n).fill(p));
    let cells = [], at = [];
    this.states = this.frames.map((frame, k) => {
      [cells, at] = [[...cells], [...at]];
      for (const [rank, stack] of frame.at) at[rank] = stack;
      for (const [s, numbers] of frame.memory) {
        const before = cells[s] && isAlive(cells[s]) ? cells[s] : [];
        cells[s] = numbers ? numbers.map((number, i) => {
          const [value, kind, element, origin] = this.cells[number], isSame = before[i] && before[i].value === value;
          return { value, kind, element, origin, by: isSame ? before[i].by : k };
        }) : before.map((cell) => ({ ...cell, kind: "freed" }));
      }
      return { cells, at };
    });
    this.held = this.states.map((state) => Array.from({ length: this.ranks }, (_, rank) =>
      total(this.storages.map((one, s) => (one.rank === rank && isAlive(state.cells[s]) ? one.nbytes : 0)))));
    for (const one of this.operations) {
      one.start = Math.min(...one.arrows.map((a) => a[3]));
      one.end = Math.max(...one.arrows.map((a) => a[4]));
    }
    this.rows = this.makeRows();
    this.phases = this.makePhases();
  }

  /** Rows with the storages of each rank, by part; and of each storage the place of each cell, [x, y]. */
  makeRows() {
    const first = ["parameters", "ParameterBuffer.flat", "gradients"], rows = new Map();
    const grid = (n, wide, left, from) => Array.from({ length: n }, (_, i) =>
      [left + ((from + i) % wide), Math.floor((from + i) / wide)]);
    const order = ({ row }) => first.indexOf(row) + 1 || (/moment|exp_avg/.test(row) ? 9 : 5);
    this.wide = Math.max(this.param.length < 32 ? 8 : 16, ...this.storages.map(({ shards }) => total(shards)));
    for (const s of [...this.storages.keys()].sort((a, b) => order(this.storages[a]) - order(this.storages[b]))) {
      const { row, rank, part } = this.storages[s];
      if (!rows.has(row)) rows.set(row, { name: row, lines: 1, slots: this.held[0].map(() => ({})) });
      (rows.get(row).slots[rank][part] ||= []).push(s);
    }
    for (const row of rows.values()) {
      for (const slots of row.slots) {
        let at = 0, cut = 0; // cells before this part: of what flows from line to line, and of what has a line a shard
        for (const part of Object.keys(slots).sort((a, b) => a.localeCompare(b, "en", { numeric: true }))) {
          const storages = slots[part].map((s) => this.storages[s]);
          for (const storage of storages) {
            const { shards, numel } = storage, left = (b) => cut + total(shards.slice(0, b));
            storage.place = shards.length ? shards.flatMap((n, b) => grid(n * this.ranks, n, left(b), 0))
              : grid(numel, this.wide, 0, at);
            row.lines = Math.max(row.lines, ...storage.place.map(([, y]) => y + 1));
          }
          if (storages[0].shards.length) cut += total(storages[0].shards) + 1;
          else at += Math.max(...storages.map(({ numel }) => numel));
        }
      }
    }
    return [...rows.values()];
  }

  /** Of each phase where it begins; the line that calls a method belongs to it. */
  makePhases() {
    const phases = [];
    this.frames.forEach(({ phase, step }, k) => {
      const before = last(phases), isSame = before && before.phase === phase && before.step === step;
      if (before && (phase === "" || phase === "step" || isSame)) before.end = k + 1;
      else phases.push({ phase: phase || "start", step, start: before ? before.end : 0, end: k + 1 });
    });
    return phases;
  }

  /** Bytes that each rank gives and gets in some collectives. */
  traffic(arrows) {
    const give = Array(this.ranks).fill(0), get = [...give];
    for (const [from, to, n] of arrows) { give[from] += n; get[to] += n; }
    return [give, get];
  }

  /** Operations that have brought a rank something in frame k, each with the ranks that it comes from. */
  arrivals(rank, k) {
    return this.operations.flatMap(({ kind, arrows }) => {
      const from = arrows.filter((a) => a[1] === rank && a[4] === k).map((a) => a[0]);
      return from.length ? [{ kind, senders: [...new Set(from)] }] : [];
    });
  }

  /** What is drawn of a row on a rank: of each part the storage that came last. */
  drawn(row, rank, k) {
    const { cells } = this.states[k];
    return Object.values(row.slots[rank]).map((some) => last(some.filter((s) => cells[s]))).filter((s) => s >= 0);
  }

  /** What is drawn of a row on a rank and has the same part as storage `s` of `player`, be it another run's. */
  twin(row, rank, k, s, player) {
    return this.drawn(row, rank, k).find((one) => this.storages[one].part === player.storages[s].part);
  }

  place(rank, k) { return last(this.stacks[this.states[k].at[rank]]); }

  /** What a rank holds in a row, in words. */
  describe(row, rank, k) {
    const counts = new Map();
    for (const s of this.drawn(row, rank, k)) {
      for (const { kind, element, origin } of this.states[k].cells[s]) {
        let words = WORDS[kind];
        if (kind === "gradient" && origin !== rank) words = `gradient of rank ${origin}`;
        if (kind === "share") words = origin === rank ? "own gradient ÷ d" : "gradient ÷ d of others";
        if (["average", "new"].includes(kind) && this.owners[element] === rank) words += " (own)";
        if (kind !== "padding" && kind !== "freed") counts.set(words, (counts.get(words) || 0) + 1);
      }
    }
    const order = (words) => Object.values(WORDS).findIndex((word) => words.startsWith(word));
    const sorted = [...counts].sort(([a], [b]) => order(a) - order(b) || a.localeCompare(b));
    return sorted.map(([words, count]) => `${words} × ${count}`).join(", ") || "nothing";
  }

  /** Collectives that are in flight in frame k, or have been since frame `from`. */
  inFlight(from, k) { return this.operations.filter((one) => one.start <= k && one.end > from); }
}

const players = {};
const player = (id) => (players[id] ||= new Player(DATA.programs.find((program) => program.id === id)));

// ---------------------------------------------------------------- the picture: page and chapters have it from here

const tag = (name, attributes, inside = "") => {
  const text = Object.entries(attributes).map(([key, value]) => ` ${key}="${escape(value)}"`).join("");
  return `<${name}${text}${inside === "" ? "/>" : `>${inside}</${name}>`}`;
};
const write = (x, y, kind, words, more = {}) => tag("text", { x, y, class: kind, ...more }, escape(words));

/** Stripes in the colour of each owner: gradients wide, what is divided fine, moments level. */
function patterns(ranks) {
  const of = (kind, rank, size, turn, stroke, paper) => {
    const fill = rank < 0 ? "var(--everyone)" : `var(--rank${rank})`;
    const box = { width: size, height: size }, turned = { patternTransform: `rotate(${turn})` };
    return tag("pattern", { id: `${kind}${rank}`, ...box, patternUnits: "userSpaceOnUse", ...turned },
      tag("rect", { ...box, fill, "fill-opacity": paper })
      + tag("path", { d: `M0 0V${size}`, stroke: fill, "stroke-width": stroke }));
  };
  const all = Array.from({ length: ranks + 1 }, (_, i) => [
    of("gradient", i - 1, 5, 45, 5, 0.3), of("share", i - 1, 3, 45, 1.4, 0.12), of("moment", i - 1, 4, 90, 3, 0.25)]);
  return tag("defs", {}, all.flat().join(""));
}

const cellRect = (kind, owner, x, y, width, height, written = "", more = {}) => tag("rect", {
  class: `cell ${kind}${written}${owner < 0 ? "" : ` o${owner}`}`, x, y, width, height,
  rx: kind === "new" ? (height + 1) / 3 : 1, ...more,
  ...(/gradient|share|moment/.test(kind) && { fill: `url(#${kind}${owner})` }),
});

function drawCell(p, s, cell, k, from, x, y, size, high) {
  const cells = p.states[k].cells[s], { value, kind, element, by } = cells[cell];
  const before = cell && cells[cell - 1].element;
  const isShared = kind === "moment" && p.owners[0] >= 0;
  const owner = isShared ? p.storages[s].rank : element === null ? -1 : p.owners[element];
  const written = by > from && kind !== "freed" ? " written" : "";
  const isNext = kind !== "freed" && cell && ![element, before].includes(null) && p.param[element] !== p.param[before];
  const hasGap = isNext && p.storages[s].place[cell][0];
  const gap = hasGap ? tag("path", { class: "gap", d: `M${x - 0.5} ${y}v${high}` }) : "";
  const text = kind === "freed" || size < 20 ? "" : kind === "padding" ? "·" : number(value);
  const small = Math.min(11, (1.6 * size) / Math.max(3, text.length));
  const style = small < 11 && { style: `font-size:${small}px` };
  const at = { "data-s": s, "data-cell": cell, tabindex: -1 };
  const rect = cellRect(kind, owner, x, y, size - 1, high - 1, written, at);
  return rect + gap + (text && write(x + size / 2 - 0.5, y + high - 5, `value ${kind}`, text, style));
}

function number(value) {
  if (value === null) return "?";
  const texts = [5, 4, 3, 2].map((digits) => `${+value.toPrecision(digits)}`);
  return texts.find((text) => text.length <= 5) || value.toExponential(0);
}

/** A row of all ranks, with its top at `top` -> svg. */
function drawRow(p, row, k, from, top, { column, cell: size, high }) {
  return row.slots.map((_, rank) => {
    const draw = (s) => p.storages[s].place.map(([x, y], cell) =>
      drawCell(p, s, cell, k, from, rank * column + x * size, top + y * high, size, high)).join("");
    const words = `rank ${rank}, ${row.name}: ${p.describe(row, rank, k)}`;
    const group = { class: "cells", role: "group", tabindex: 0, "aria-label": words };
    return tag("g", group, p.drawn(row, rank, k).map(draw).join(""));
  }).join("");
}

/** All memory of all ranks in frame k, and what has been in flight since frame `from` -> svg.

    Cells are as wide as they fit beside each other, and as high as `rows` fit below each other. */
function drawMemory(p, k, from, width, height, looks, lanes, rows) {
  const top = 42 + 20 * lanes, nLines = total(rows.map(({ lines }) => lines)) || 1;
  const column = (width + 10) / p.ranks, cell = Math.min(34, Math.floor((10 * (column - 10)) / p.wide) / 10);
  const fitting = Math.floor((height - top - 19 * rows.length) / nLines);
  const high = cell > 20 ? 18 : Math.max(7, Math.min(18, 2 * cell, fitting));
  const out = p.held[k].map((bytes, rank) => {
    const x = rank * column;
    return tag("rect", { x, y: 0, width: column - 10, height: 4, class: `bar o${rank}` })
      + write(x, 18, "rank", `rank ${rank}`) + write(x, 31, "soft", `${bytes} B`);
  });
  const moving = p.inFlight(from, k), lanesOf = moving.length > lanes ? [together(moving)] : moving;
  out.push(...lanesOf.map((one, i) => drawLane(p, one, k < one.end, 38 + i * 20, width)));
  if (!moving.length) out.push(write(0, 51, "soft", "nothing is in flight"));
  let y = top;
  for (const row of rows) {
    const texts = [...new Set(row.slots.map((_, rank) => p.describe(row, rank, k)))];
    const all = texts[0] === "nothing" ? "not there" : `each rank: ${texts[0]}`;
    const said = width < 500 ? "" : texts.length === 1 ? all : texts.slice(0, 2).join(" | ").slice(0, 80);
    const name = `${row.name === looks ? "▶ " : ""}${escape(row.name)} `;
    const words = name + tag("tspan", { class: "soft" }, escape(said) || " ");
    out.push(tag("text", { x: 0, y: y + 11, class: "name" }, words));
    const cells = drawRow(p, row, k, from, y + 15, { column, cell, high });
    out.push(tag("g", { class: "row", "data-row": row.name }, cells));
    y += row.lines * high + 19;
  }
  const small = cell < 8 ? " small" : "", all = patterns(p.ranks) + out.join("") + '<g class="flying"></g>';
  const label = { role: "group", "aria-label": "memory of all ranks" };
  return tag("svg", { class: `memory${small}`, viewBox: `0 0 ${width} ${y}`, width, height: y, ...label }, all);
}

const together = (some) => ({
  ...some[0], kind: `${some.length} ${some[0].kind}s`, params: some.flatMap((one) => one.params),
  arrows: some.flatMap((one) => one.arrows), end: Math.max(...some.map((one) => one.end)),
});

const named = ({ params }, between) => params.map((i) => `p${i}`).join(between);

/** A collective is one bar over all ranks. */
function drawLane(p, one, isLive, y, width) {
  const [give, get] = p.traffic(one.arrows), isSame = give.every((n, r) => n === give[0] && get[r] === get[0]);
  const root = `rank ${give.findIndex((n) => n)} gives ${Math.max(...give)} B, the others get ${Math.max(...get)}`;
  const sizes = isSame ? `each rank gives ${give[0]} B, gets ${get[0]}` : root;
  const params = one.params.length > 6 ? `${one.params.length} tensors` : named(one, " ");
  const words = width < 500 ? [one.kind, isLive ? "in flight" : `each rank gives ${mean(give)} B`]
    : [one.kind, `${one.what || "values"} of ${params}`, sizes, ...(isLive ? ["in flight"] : [])];
  return tag("g", { class: `lane ${one.what || "other"}${isLive ? " live" : ""}` },
    tag("rect", { x: 0, y, width, height: 17, rx: 4 }) + write(6, y + 12.5, "", words.join(" · ")));
}

/** What runs, from left to right, and what is in flight meanwhile: a line for each collective -> [svg, height]. */
function drawOverlap(p, width, high, now) {
  const x = (k) => (k / p.frames.length) * width, tall = 18 + p.operations.length * high;
  const out = p.phases.map(({ phase, start, end }) => {
    const wide = x(end) - x(start), isNow = now >= start && now < end;
    return tag("g", { class: `phase${isNow ? " now" : ""}`, "data-k": start },
      tag("rect", { x: x(start), y: 0, width: Math.max(1, wide - 1), height: 15 })
      + (wide > 6.4 * phase.length ? write(x(start) + wide / 2, 11, "", phase) : ""));
  });
  p.operations.forEach((one, i) => {
    const y = 18 + i * high, isLate = one.start > p.frames.length / 2;
    const words = `${one.kind} of ${named(one, ", ")}`;
    const anchor = { "text-anchor": isLate ? "end" : "start" };
    const left = x(one.start), right = x(one.end);
    out.push(tag("rect", { class: `bar ${one.what}`, x: left, y, width: right - left, height: high - 1 }));
    if (high > 10) out.push(write(isLate ? left - 6 : right + 6, y + high - 5, "soft", words, anchor));
  });
  if (now !== undefined) out.push(tag("path", { class: "needle", d: `M${x(now + 0.5)} 0V${tall}` }));
  return [out.join(""), tall];
}

/** The SVG files that the chapters show. */
function figures() {
  const style = document.querySelector("style").textContent.match(/\/\* picture \*\/([\s\S]*?)\/\* end \*\//)[1];
  const file = (title, width, height, p, body, note) => {
    const size = { viewBox: `-10 -10 ${width + 20} ${height + 40}`, width: width + 20, height: height + 40 };
    const paper = tag("rect", { x: -10, y: -10, width: "100%", height: "100%", class: "paper" });
    const bare = body.replaceAll(/ (?:tabindex|data-\w+|role|aria-label)="[^"]*"/g, "");
    const stamp = { role: "img", "data-stamp": DATA.stamp.slice(0, 16) };
    return tag("svg", { xmlns: "http://www.w3.org/2000/svg", ...size, ...stamp },
      tag("title", {}, title) + `<style>${style}</style>` + paper + patterns(p.ranks) + bare
      + write(0, height + 14, "soft", note)) + "\n";
  };
  const small = player("3-small"), sizes = { column: 158, cell: 34, high: 19 };
  const buffer = small.rows.find((row) => row.name === "GradBuffer.flat");
  const states = small.beats.map(({ says, frame }, i) =>
    write(0, 29 + i * 108, "name", says) + drawRow(small, buffer, frame, frame, 36 + i * 108, sizes));
  const ranks = small.held[0].map((_, rank) => write(rank * 158, 8, "rank", `rank ${rank}`));

  const four = player("4"), flat = four.rows.find((row) => row.name === "ParameterBuffer.flat");
  const [first] = four.drawn(flat, 0, 0), { shards, place } = four.storages[first];
  const left = (bucket) => 90 + 28 * total(shards.slice(0, bucket)) + 22 * bucket;
  const bucketOf = (x) => shards.findIndex((_, b) => x < total(shards.slice(0, b + 1)));
  const buckets = place.map(([x, y], cell) =>
    drawCell(four, first, cell, 0, 0, 90 + 28 * x + 22 * bucketOf(x), 20 + y * 19, 28, 19));
  const params = (bucket) => named(four.operations[bucket], ", "); // gradients leave bucket by bucket
  buckets.push(...shards.map((_, bucket) => write(left(bucket), 11, "name", `${bucket}: ${params(bucket)}`)));
  for (let rank = 0; rank < four.ranks; rank++) buckets.push(write(0, 33 + rank * 19, "soft", `rank ${rank} owns`));

  const [strip, tall] = drawOverlap(four, 800, 17);
  return {
    "show_buffer.svg": file("The buffer of stage 3 on four ranks: its five states", 610, 555, small,
      ranks.join("") + states.join(""),
      "Colour: a shard's owner. Striped: own gradients. Full: averages. Round: updated parameters. Grey: garbage."),
    "show_buckets.svg": file("Stage 4: the parameters of one rank in buckets, each cut into four shards",
      left(shards.length), 98, four, buckets.join(""),
      "Gradients leave in buckets 0 to 6, in this order. Updated parameters arrive in the reverse order. ·: padding."),
    "show_overlap.svg": file("Stage 4: what rank 0 runs, and what is in flight meanwhile", 800, tall, four, strip,
      "From left to right: lines of code, not seconds. Two bucket buffers: at most two reduce-scatters in flight."),
  };
}

// ------------------------------------------------------------------------------------------------ beats and lines

const now = { id: "0", k: 0, beat: 0, playing: false }; // beat: -1 where lines are shown, one by one

const beats = () => player(now.id).beats;
/** The frame that the picture is compared with: everything that has changed since is marked. */
const since = () => {
  if (now.beat > 0) return beats()[now.beat - 1].frame;
  return now.beat < 0 || player(now.id).bug ? now.k - 1 : now.k;
};

function toBeat(beat) {
  const to = clamp(beat, beats().length - 1), isNext = to === now.beat + 1;
  Object.assign(now, { beat: to, k: beats()[to].frame });
  draw();
  if (isNext && !STILL.matches) fly(player(now.id), since(), now.k);
}

function toFrame(k) {
  Object.assign(now, { beat: -1, k: clamp(k, player(now.id).frames.length - 1) });
  draw();
}

/** The beat that a frame belongs to: the first that it isn't beyond. */
const nearest = (k) => clamp(beats().filter(({ frame }) => frame < k).length, beats().length - 1);

function step(by) {
  let to = now.beat + by;
  if (now.beat < 0) {
    const at = nearest(now.k), { frame } = beats()[at];
    to = by < 0 ? at - (frame >= now.k) : at + (frame <= now.k);
  } else if (by > 0 && $("predict").checked && to < beats().length && ask(to)) return;
  toBeat(to);
}

function select(id, beat = 0, frame = undefined) {
  Object.assign(now, { id, beat: -2 });
  if (frame === undefined) toBeat(beat); else toFrame(frame);
}

let timer = 0;
function play(on) {
  now.playing = on;
  clearTimeout(timer);
  $("play").textContent = on ? "❚❚ pause" : "▶ play";
  if (!on) return;
  const isBeat = now.beat >= 0;
  const isLast = () => (isBeat ? now.beat >= beats().length - 1 : now.k >= player(now.id).frames.length - 1);
  if (isLast()) { if (isBeat) toBeat(0); else toFrame(0); }
  const next = () => {
    if (isBeat) step(1); else toFrame(now.k + 1);
    if (isLast() || $("question").open) play(false); else timer = setTimeout(next, beatMs / (isBeat ? 1 : 10));
  };
  timer = setTimeout(next, beatMs / (isBeat ? 2 : 10));
}

/** A cell as it is drawn; of a pair of runs, that of the left one. */
const rectOf = (s, cell) => document.querySelector(`.panel rect[data-s="${s}"][data-cell="${cell}"]`);

/** Cells that a collective has brought between two frames fly from the ranks that they come from. */
function fly(p, from, k) {
  const layer = document.querySelector(".panel .flying");
  const flyFrom = (sender, row, s, cell) => {
    const here = rectOf(s, cell), there = rectOf(p.twin(row, sender, k, s, p), cell);
    if (!here || !there) return;
    const flying = here.cloneNode(), dx = there.x.baseVal.value - here.x.baseVal.value;
    for (const name of ["tabindex", "data-s"]) flying.removeAttribute(name);
    layer.append(flying);
    const path = [`translate(${dx}px,0)`, `translate(${dx / 2}px,-14px)`, "none"].map((transform) => ({ transform }));
    flying.animate(path, { duration: 550, easing: "ease-in-out" }).onfinish = () => flying.remove();
  };
  for (const row of p.rows) {
    row.slots.forEach((_, rank) => p.drawn(row, rank, k).forEach((s) => p.states[k].cells[s].forEach((one, cell) => {
      for (const { kind, senders } of one.by > from ? p.arrivals(rank, one.by) : []) {
        const isFrom = (sender) => /reduce/.test(kind) || (one.element !== null && p.owners[one.element] === sender);
        for (const sender of senders.filter(isFrom)) flyFrom(sender, row, s, cell);
      }
    })));
  }
}

// ------------------------------------------------------------------------------------------------ the page

function draw() {
  const p = player(now.id), beat = now.beat >= 0 ? beats()[now.beat] : null;
  const [name, , , , doc] = p.functions[p.place(0, now.k)[0]];
  const says = beat ? beat.says : `${name}: ${(doc || "a line of it").split("\n")[0]}`;
  if ($("says").textContent !== says) $("says").textContent = says;
  $("intro").textContent = p.title;
  drawMeters(p);
  drawCode(p, beat);
  drawFooter(p); // before the panels, which take the height that is left
  drawPanels(p, beat);
  history.replaceState(null, "", `#${now.id}${beat ? `.${now.beat + 1}` : `/${now.k + 1}`}`);
}

function drawMeters(p) {
  const meter = (words, value, of, text) => {
    const bar = tag("progress", { max: of, value, "aria-label": words }, " ");
    const end = of ? ` of ${of} B <span>= ${escape(text)}</span>${bar}` : "";
    return `<span class="meter"><b>${words} ${value} B</b>${end}</span>`;
  };
  const arrows = p.operations.flatMap((one) => one.arrows).filter((a) => a[3] <= now.k), formula = p.formula || {};
  const most = mean(p.held[0].map((_, rank) => Math.max(...p.held.map((one) => one[rank]))));
  const held = p.held[now.k], words = Math.min(...held) < Math.max(...held) ? "holds (mean)" : "holds";
  $("meters").innerHTML = meter("sent", mean(p.traffic(arrows)[0]), formula.sent_bytes, formula.sent)
    + meter(words, mean(held), formula.held_bytes, `${formula.held} after a step; at most ${most} B`);
}

/** A function with the lines that are `marked`, the ranks that are at a line, and the edit as a diff. */
function drawFunction(p, f, marked, ranks, isBeat) {
  const [name, file, first, end] = p.functions[f], source = p.files[file][1].split("\n");
  const edit = p.edit && p.edit.file === file ? p.edit : { line: 0, come: 0, gone: [] };
  const out = [`<div class="name">${name}, ${p.files[file][0]}:${marked[0]}</div>`];
  const indent = source[first - 1].search(/\S/);
  const cut = (text) => (text.slice(0, indent).trim() ? text : text.slice(indent));
  const add = (kind, gutter, text) => out.push(
    `<div class="code-line${kind}"><span class="gutter">${gutter}</span><code>${text}</code></div>`);
  let inDoc = false;
  for (let n = first; n <= end + 1; n++) {
    if (n === edit.line) edit.gone.forEach((text) => add(" gone", "−", escape(cut(text))));
    if (n > end) break;
    const text = source[n - 1], quotes = text.split('"""').length - 1, isDoc = inDoc || quotes > 0;
    if (quotes === 1) inDoc = !inDoc;
    if (isDoc && isBeat) continue;
    const isNew = n >= edit.line && n < edit.line + edit.come;
    const at = ranks.filter(([, one]) => one === n).map(([rank]) => `<b class="o${rank}">${rank}</b>`).join("");
    add(`${marked.includes(n) ? " now" : ""}${isNew ? " come" : ""}`, isNew ? "+" : at, escape(cut(text)));
  }
  return `<div class="function">${out.join("")}</div>`;
}

function drawCode(p, beat) {
  const { at } = p.states[now.k], where = at.map((_, rank) => [rank, ...p.place(rank, now.k)]);
  const shown = beat ? [[beat.function, beat.lines]] : p.stacks[at[0]].map(([f, line]) => [f, [line]]);
  if (p.edit) {
    const { file, line } = p.edit;
    const f = p.functions.findLastIndex((one) => one[1] === file && one[2] <= line && line <= one[3] + 1);
    if (!shown.some(([one]) => one === f)) shown.unshift([f, [line]]);
  }
  const ranksIn = (f) => where.filter(([, one]) => one === f).map(([rank, , line]) => [rank, line]);
  $("code").innerHTML = shown.map(([f, lines]) => drawFunction(p, f, lines, ranksIn(f), Boolean(beat))).join("");
  $("code").classList.toggle("beat", Boolean(beat));
  const mark = last([...$("code").querySelectorAll(".now")]);
  if (mark) $("code").scrollTop = Math.max(0, mark.offsetTop - $("code").clientHeight * 0.6);
}

/** The memory; in a beat of a bug, that of the right run beside it. */
function drawPanels(p, beat) {
  const box = $("panels"), sides = [[p, now.k, since(), "with the bug"]], isPair = Boolean(beat && p.right);
  if (isPair) {
    const from = now.beat ? beats()[now.beat - 1].right : beat.right - 1;
    sides.push([player(p.right), beat.right, from, "the right run"]);
  }
  const across = isNarrow() ? 1 : sides.length, width = Math.floor((box.clientWidth - 14 * across) / across);
  const taken = isNarrow() ? $("said").offsetHeight + $("code").offsetHeight + 26 : 8;
  const height = (box.parentElement.clientHeight - taken) / (sides.length / across) - (isPair ? 30 : 8);
  const rowsOf = (q) => (isNarrow() && isPair ? q.rows.filter((row) => row.name === beat.look) : q.rows);
  const counts = p.beats.map(({ frame }, i) => p.inFlight(i ? p.beats[i - 1].frame : frame, frame).length);
  const lanes = Math.min(isNarrow() ? 1 : 3, Math.max(1, ...counts));
  box.innerHTML = sides.map(([q, k, from, title]) => {
    const memory = drawMemory(q, k, from, width, height, beat && beat.look, lanes, rowsOf(q));
    return `<div class="panel">${isPair ? `<h2>${title}</h2>` : ""}${memory}</div>`;
  }).join("");
  if (isPair) markDifferences(...sides);
  const look = ({ target: { dataset: at, parentElement } }) => {
    if (at.s) inspect(...sides[[...box.children].indexOf(parentElement.closest(".panel"))], +at.s, +at.cell);
  };
  Object.assign(box, { onmouseover: look, onclick: look, onfocus: look });
}

/** In the run with the bug: cells that hold another value than in the right one, garbage aside. */
function markDifferences([p, k], [q, m]) {
  const isNothing = ({ kind }) => ["freed", "garbage", "unset"].includes(kind);
  for (const row of p.rows) {
    const theirs = q.rows.find((one) => one.name === row.name);
    for (const s of theirs ? row.slots.flatMap((_, rank) => p.drawn(row, rank, k)) : []) {
      const other = q.twin(theirs, p.storages[s].rank, m, s, p);
      (other === undefined ? [] : p.states[k].cells[s]).forEach((mine, cell) => {
        const right = q.states[m].cells[other][cell];
        const isSame = isNothing(mine) || isNothing(right) || mine.value === right.value;
        if (!isSame) rectOf(s, cell)?.classList.add("wrong");
      });
    }
  }
}

function inspect(p, k, from, title, s, cell) {
  const { rank, row, part } = p.storages[s], { value, kind, element: e, origin, by } = p.states[k].cells[s][cell];
  const whose = e === null ? "no element of the model" : `element ${e - p.param.indexOf(p.param[e])} of p${p.param[e]}`;
  const owner = e === null ? "" : p.owners[e] === -1 ? "; every rank updates it" : `; rank ${p.owners[e]} updates it`;
  const what = {
    gradient: `gradient of rank ${origin}`, share: `gradient of rank ${origin} ÷ ${p.ranks}`,
    average: "average over the ranks", garbage: "garbage: nobody reads it before it is written or released",
    stale: "stale parameter: a newer one is on its way",
  }[kind] || WORDS[kind];
  const came = p.arrivals(rank, by).map((one) => `${one.kind} from rank ${one.senders.join(", ")}`);
  const [f, line] = p.place(rank, by), [writer, file] = p.functions[f];
  const place = `written at ${p.files[file][0]}:${line} in ${writer} (line ${by + 1})`;
  const name = `rank ${rank} · ${escape(row)}${part && ` ${part}`}[${cell}] = ${number(value)}`;
  $("inspector").innerHTML = `<b>${name}</b> · ${what} · ${whose}${owner} · `
    + (by ? place : "there from the start") + (by && came.length ? `, arrived by ${came.join("; ")}` : "");
}

function drawFooter(p) {
  const link = (i) => tag("a", {
    href: `#${now.id}.${i + 1}`, "aria-label": `beat ${i + 1}`, ...(i === now.beat && { "aria-current": "step" }),
  }, `${i + 1}`);
  $("beats").innerHTML = beats().map((_, i) => link(i)).join("");
  const width = $("band").clientWidth, [svg, height] = drawOverlap(p, width, 3, now.k);
  $("band").innerHTML = tag("svg", { width, height }, svg);
  Object.assign($("slider"), { max: p.frames.length - 1, value: now.k });
  const beat = `beat ${now.beat + 1} of ${beats().length}`;
  $("where").textContent = now.beat < 0 ? `line ${now.k + 1} of ${p.frames.length}` : beat;
  const shown = DATA.programs.filter((one) => !one.hidden), isNow = (one) => one.id === now.id;
  const tab = (one) => tag("a", { href: `#${one.id}`, role: "tab", "aria-selected": isNow(one) },
    `${escape(one.short).replace(" ", " <span>")}</span>`);
  const option = (one) => tag("option", { value: one.id, ...(isNow(one) && { selected: "" }) }, escape(one.short));
  $("programs").innerHTML = shown.filter((one) => !one.bug).map(tab).join("");
  $("bugs").innerHTML = `<option value="">–</option>${shown.filter((one) => one.bug).map(option).join("")}`;
  $("lines").setAttribute("aria-pressed", now.beat < 0);
}

/** Before a beat is shown: what will a rank hold in its row? Wrong answers are what the row holds in other beats. */
function ask(to) {
  const p = player(now.id), beat = beats()[to], row = p.rows.find((one) => one.name === beat.look);
  const heldIn = (k) => (row ? row.slots.map((_, rank) => p.describe(row, rank, k)) : []);
  const before = heldIn(now.k), after = heldIn(beat.frame), rank = after.findIndex((words, r) => words !== before[r]);
  if (rank < 0) return false;
  const right = after[rank], others = beats().flatMap(({ frame }) => heldIn(frame));
  const answers = [...new Set([right, before[rank], ...others])].slice(0, 3).sort();
  play(false);
  $("question").innerHTML = `<b>What will rank ${rank} hold in ${escape(row.name)}?</b>`
    + answers.map((text) => `<button>${escape(text)}</button>`).join("");
  const buttons = [...$("question").children].slice(1), on = document.createElement("button");
  on.onclick = () => { $("question").close(); toBeat(to); };
  const answer = ({ target }) => {
    on.textContent = target.textContent === right ? "Right. Go on" : "Not so. Go on, and look";
    for (const one of buttons) {
      one.disabled = true;
      one.className = one.textContent === right ? "right" : one === target ? "wrong" : "";
    }
    $("question").append(on);
    on.focus();
  };
  for (const button of buttons) button.onclick = answer;
  $("question").showModal();
  return true;
}

// --------------------------------------------------------------------------------------------------- controls

function keys(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("question").open) return;
  if (/^(SELECT|INPUT)$/.test(target.tagName) && target.type !== "checkbox") return;
  if (key === " " && /^(BUTTON|INPUT|A)$/.test(target.tagName)) return;
  const group = target.closest && target.closest(".cells");
  if (group && (target !== group ? /^Arrow|Escape/ : /^Enter/).test(key)) {
    const cells = [...group.querySelectorAll(".cell")], by = /Right|Down/.test(key) ? 1 : -1;
    const to = key === "Escape" ? group : cells[key === "Enter" ? 0 : cells.indexOf(target) + by];
    if (to) to.focus();
    event.preventDefault();
    return;
  }
  const arrows = { ArrowRight: "forward", ArrowLeft: "back", ArrowDown: "down", ArrowUp: "up" };
  const button = { " ": "play", "?": "help", ...arrows }[key], end = { Home: 0, End: Infinity }[key];
  if (button) $(button).click();
  else if (end !== undefined) paused(() => (now.beat < 0 ? toFrame(end) : toBeat(end)))();
  else return;
  event.preventDefault();
}

const paused = (action) => (...event) => { play(false); action(...event); };

let touched = null;
function swipe({ changedTouches: [to] }) {
  const x = to.clientX - touched.clientX, y = to.clientY - touched.clientY;
  if (Math.abs(x) > 50 && Math.abs(x) > 2 * Math.abs(y)) $(x < 0 ? "forward" : "back").click();
}

/** What a link says: #4.7 is a beat, #4/118 a line. */
function follow() {
  const [, id, mark, at] = decodeURIComponent(location.hash).match(/^#([^/.]*)([/.]?)(.*)$/) || [];
  const { id: known } = DATA.programs.find((one) => one.id === id && !one.hidden) || DATA.programs[0];
  const place = +at - 1 || 0, isLine = mark === "/" && at !== "wrong";
  select(known, isLine ? 0 : place, isLine ? place : undefined);
}

async function start() {
  const packed = Uint8Array.from(atob($("data").textContent), (sign) => sign.charCodeAt(0));
  DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const picture = (kind) => tag("svg", { width: 22, height: 12 }, patterns(1) + cellRect(kind, 0, 1, 1, 20, 10));
  const sample = (kind) => `<span>${picture(kind)}${WORDS[kind]}</span>`;
  const kinds = ["gradient", "share", "average", "old", "new", "stale", "moment", "garbage"];
  $("legend").innerHTML = `<span>colour: the rank that updates it</span>${kinds.map(sample).join("")}`;
  const actions = {
    back: () => step(-1), forward: () => step(1), up: () => toFrame(now.k - 1), down: () => toFrame(now.k + 1),
    lines: () => (now.beat < 0 ? toBeat(nearest(now.k)) : toFrame(now.k)),
  };
  for (const [id, action] of Object.entries(actions)) $(id).onclick = paused(action);
  $("play").onclick = () => play(!now.playing);
  $("slider").oninput = paused(() => toFrame(+$("slider").value));
  $("bugs").onchange = paused(() => select($("bugs").value || now.id));
  $("band").onclick = ({ target }) => {
    const phase = target.closest(".phase");
    if (phase) paused(toFrame)(+phase.dataset.k);
  };
  $("panels").addEventListener("focusin", (event) => $("panels").onfocus(event));
  document.addEventListener("keydown", keys);
  window.addEventListener("resize", draw);
  window.addEventListener("hashchange", follow);
  document.body.addEventListener("touchstart", ({ touches }) => { touched = touches[0]; }, { passive: true });
  document.body.addEventListener("touchend", swipe);
  follow();
  document.body.dataset.ready = "yes";
}
start();
