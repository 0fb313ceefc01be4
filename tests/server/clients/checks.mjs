// Shared by the clients for node: where the server is, packages, a run of named checks.
//
//     MOEBA_URL=http://127.0.0.1:8080 MOEBA_KEY=KEY NODE_PATH=FOLDER/node_modules node SCRIPT
//
// Each script prints a line for each check and ends with 0; with 1 if a check has failed; with 77
// if its package is missing.

import { createRequire } from "node:module";

export const URL = process.env.MOEBA_URL ?? "http://127.0.0.1:8080";
export const KEY = process.env.MOEBA_KEY ?? "none";
export const MODEL = "moeba-demo";
export const HELLO = [{ role: "user", content: "What is a branch?" }];
export const WEATHER = {
  type: "object",
  properties: { town: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["town"],
  additionalProperties: false,
};

// A package; import does not look into NODE_PATH, require does.
export function need(name) {
  try {
    return createRequire(import.meta.url)(name);
  } catch (error) {
    if (error.code !== "MODULE_NOT_FOUND") throw error;
    console.log(`skipped: no package ${name}`);
    process.exit(77);
  }
}

export async function waitIdle() {
  const end = Date.now() + 30_000;
  for (;;) {
    const headers = { authorization: `Bearer ${KEY}` };
    const slots = await (await fetch(`${URL}/slots`, { headers })).json();
    if (!slots.some((slot) => slot.is_processing)) return;
    if (Date.now() > end) throw new Error("a slot is not free after 30 s");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

// The error of a promise, which has this type and status.
export async function rejects(promise, type, status) {
  let error = null;
  try {
    await promise;
  } catch (found) {
    error = found;
  }
  if (!(error instanceof type) || error.status !== status) {
    throw new Error(`no ${type.name} of ${status}: ${error}`);
  }
  return error;
}

export async function run(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`ok      ${name}`);
    } catch (error) {
      failed += 1;
      console.log(`FAILED  ${name}\n${error.stack}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
