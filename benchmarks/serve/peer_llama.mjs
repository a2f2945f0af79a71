// llama.cpp by node-llama-cpp, which ships builds for each instruction set; lines as peer_worker.py has them.
import { getLlama } from "node-llama-cpp";
import readline from "readline";

const llama = await getLlama({ gpu: false, build: "never", maxThreads: 1, logLevel: "error" });
const model = await llama.loadModel({ modelPath: process.argv[2], gpuLayers: 0 });
const context = await model.createContext({ sequences: 8, contextSize: 2304, batchSize: 2048, threads: 1 });
const sequences = Array.from({ length: 8 }, () => context.getSequence());

async function answered(sequence, prompt, count) {
  await sequence.clearHistory();
  let made = 0;
  for await (const _ of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true })) if (++made >= count) break;
  return made;
}

async function run(requests) {
  let next = 0, made = 0;
  await Promise.all(sequences.slice(0, requests.length).map(async (sequence) => {
    while (next < requests.length) {
      const [prompt, count] = requests[next++];
      made += await answered(sequence, prompt, count);
    }
  }));
  return made;
}

await run([[Array(16).fill(7), 4]]);
console.log("@ready");
for await (const line of readline.createInterface({ input: process.stdin })) {
  const before = process.cpuUsage();
  const made = await run(JSON.parse(line));
  const { user, system } = process.cpuUsage(before);
  console.log("@" + JSON.stringify([made, (user + system) / 1e6]));
}
process.exit(0);
