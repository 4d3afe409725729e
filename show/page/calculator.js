// ----------------------------------------------------------------------------------------------- the calculator

// Sizes of a model's tensors, the last first, as the backward pass reaches them; those of a layer, and the embedding.
const repeat = (n, sizes) => Array.from({ length: n }, () => sizes).flat();
const gpt2 = (layers, w) => [...repeat(layers, [4 * w * w, 4 * w * w, w * w, 3 * w * w]), 1024 * w, 50257 * w];
const llama = (layers, w, inner, keys) => [32000 * w, ...repeat(layers, [inner, inner, inner, w, keys, keys, w].map(
  (n) => n * w)), 32000 * w];
const MODELS = {
  "124M": gpt2(12, 768), "1.5B": gpt2(48, 1600), "7B": llama(32, 4096, 11008, 4096), "70B": llama(80, 8192, 28672, 1024),
};
const KINDS = ["parameters", "gradients", "main parameters", "moments", "bucket buffers"];
const colour = (kind) => `o${kind < 4 ? kind : -1}`; // as ranks have them
const REACHED = 0.4; // of a device's FLOPs, as make plan has it
const SLIDERS = { // words, least, most: powers of 10 or, of d, of 2; value at first
  psi: ["Ψ, parameters", 7, 11, 9.829], ranks: ["d, ranks", 0, 10, 6],
  bucket: ["bucket", 0, 3.3, 2], link: ["link of a rank", -1, 3.6, 2.6],
  device: ["device", -1, 3.3, 3], tokens: ["tokens per rank and step", 2, 6, 4],
};

/** Sizes of the tensors of the model that is nearest, scaled to `psi` parameters. */
function tensors(psi) {
  const far = (sizes) => Math.abs(Math.log(total(sizes) / psi)), near = Object.values(MODELS).sort((a, b) => far(a) - far(b))[0];
  return near.map((n) => (n * psi) / total(near));
}

/** Parameters of the longest bucket: a bucket is closed when it has reached the cap. */
function longestBucket(sizes, cap) {
  let longest = 0, filled = 0;
  for (const n of sizes) {
    filled += n;
    longest = Math.max(longest, filled);
    if (filled >= cap) filled = 0;
  }
  return longest;
}

/** What DDP and the stages hold on each rank, in bytes of each of KINDS, and send; with AdamW. The last entry says what
    the messages run beside: "backward", "both" passes, or nothing. */
function calculate({ psi, ranks: d, bucket, is16 }) {
  const value = is16 ? 2 : 4, shard = psi / d, wire = psi * (d - 1) / d;
  const sizes = tensors(psi), whole = Math.min(psi, Math.max(shard, ...sizes)); // of an owner of whole tensors
  const buffers = 2 * value * longestBucket(sizes, (bucket * 2 ** 20) / value);
  return is16 ? [
    ["DDP", "2 + 6 + 4 + 8", [2 * psi, 6 * psi, 4 * psi, 8 * psi, 0], "2·2Ψ", 4 * wire, "backward"],
    ["stage 1", "4 + 4/d", [2 * psi, 2 * psi, 0, 4 * whole, 0], "3·2Ψ", 6 * wire, ""],
    ["stage 2", "4 + 4/d", [2 * psi, 2 * psi, 0, 4 * whole, 0], "3·2Ψ + padding", 4 * wire + 2 * whole * (d - 1), ""],
    ["stage 3", "2 + 2 + 16/d", [2 * psi, 2 * psi + 4 * shard, 4 * shard, 8 * shard, 0], "2·2Ψ", 4 * wire, ""],
    ["stage 3, gradients in fp32", "2 + 4 + 12/d", [2 * psi, 4 * psi, 4 * shard, 8 * shard, 0], "(4 + 2)Ψ", 6 * wire, ""],
    ["stage 4", "2 + 16/d + b", [2 * psi, 4 * shard, 4 * shard, 8 * shard, buffers], "2·2Ψ", 4 * wire, "both"],
  ] : [
    ["DDP", "16", [4 * psi, 4 * psi, 0, 8 * psi, 0], "2·4Ψ", 8 * wire, "backward"],
    ["stage 1", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * whole, 0], "3·4Ψ", 12 * wire, ""],
    ["stage 2", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * whole, 0], "3·4Ψ + padding", 8 * wire + 4 * whole * (d - 1), ""],
    ["stage 3", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * shard, 0], "2·4Ψ", 8 * wire, ""],
    ["stage 4", "4 + 12/d + b", [4 * psi, 4 * shard, 0, 8 * shard, buffers], "2·4Ψ", 8 * wire, "both"],
  ];
}

/** The least seconds of a step, and how they are counted. A backward pass takes twice as long as a forward pass. */
function bound(compute, link, beside) {
  const forward = compute / 3, backward = 2 * forward;
  if (beside === "both") return [Math.max(forward, link / 2) + Math.max(backward, link / 2),
    "max(forward, all-gathers) + max(backward, reduce-scatters)"];
  if (beside === "backward") return [forward + Math.max(backward, link), "forward + max(backward, all-reduce)"];
  return [compute + link, "computing + sending"];
}

const three = (number) => (+number.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
/** A number with the largest of `units`, [size, name] each, that it reaches. */
const inUnits = (number, units) => {
  const [size, name] = units.find(([least]) => number >= least) || last(units);
  return `${three(number / size)} ${name}`.trim();
};
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const SAID = { // the value of a slider, as people write it
  psi: (n) => inUnits(n, [[1e9, "billion"], [1e6, "million"]]), ranks: (n) => n.toLocaleString("en"),
  bucket: (n) => `${three(n)} MiB`, link: (n) => inUnits(n, [[1, "Gbit/s"], [1e-3, "Mbit/s"]]),
  device: (n) => `${three(n)} TFLOP/s`, tokens: three,
};

function drawCalculator() {
  const at = Object.fromEntries(Object.keys(SLIDERS).map((id) =>
    [id, id === "ranks" ? 2 ** $(id).value : +(10 ** $(id).value).toPrecision(id === "psi" ? 4 : 2)]));
  for (const id of Object.keys(SLIDERS)) $(`${id}-is`).textContent = SAID[id](at[id]);
  const rows = calculate({ ...at, is16: $("is16").checked }), most = Math.max(...rows.map(([, , held]) => total(held)));
  const compute = (6 * at.psi * at.tokens) / (at.device * 1e12 * REACHED);
  const seconds = (n) => inUnits(n, [[1, "s"], [1e-3, "ms"]]);
  $("rows").innerHTML = rows.map(([name, formula, held, sentFormula, sent, beside]) => {
    const [least, counted] = bound(compute, sent / (at.link * 1e9 / 8), beside);
    const bars = held.map((n, i) => `<i class="${colour(i)}" style="width:${(100 * n) / most}%" title="${KINDS[i]}"></i>`).join("");
    const each = `${formula} = ${+(total(held) / at.psi).toPrecision(3)}`.replace(/^(\d+) = \1$/, "$1");
    return `<tr><th>${name}</th><td data-label="held">${inUnits(total(held), BYTES)}<small>${each} bytes
      per parameter</small></td><td class="stack">${bars}</td><td data-label="sent">${inUnits(sent, BYTES)}<small>${sentFormula} · (d-1)/d</small></td>
      <td data-label="at least">${seconds(least)}<small>${counted}</small></td></tr>`;
  }).join("");
  $("computing").textContent = seconds(compute);
}

function showCalculator(isShown) {
  document.body.classList.toggle("calculates", isShown);
  if (isShown) drawCalculator();
}

function startCalculator() {
  const slider = ([id, [words, least, most, value]]) => `<label>${words} <output id="${id}-is"></output>
    <input type="range" id="${id}" min="${least}" max="${most}" step="${id === "ranks" ? 1 : 0.001}" value="${value}"></label>`;
  $("sliders").innerHTML = Object.entries(SLIDERS).map(slider).join("");
  $("models").innerHTML = Object.keys(MODELS).map((name) => `<button title="a model of ${name}">${name}</button>`).join("")
    + '<label><input type="checkbox" id="is16"> 16-bit parameters</label>';
  $("kinds").innerHTML = KINDS.map((kind, i) => `<span><i class="${colour(i)}"></i> ${kind}</span>`).join(" ");
  $("models").onclick = ({ target }) => {
    if (MODELS[target.textContent]) $("psi").value = Math.log10(total(MODELS[target.textContent]));
    drawCalculator();
  };
  $("sliders").oninput = drawCalculator;
}
