// Build the page into sbus/web/static: one script, one style sheet, and the licences of what is in them.
// Usage: node build.mjs [DIRECTORY]

import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = path.dirname(fileURLToPath(import.meta.url));
const out = path.resolve(process.argv[2] ?? path.join(here, "..", "sbus", "web", "static"));

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.ts" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  metafile: true,
});
for (const file of ["index.html", "icon.svg"]) await cp(path.join(here, "src", file), path.join(out, file));

// The licence of every package that is in the bundle.
const packages = new Set();
for (const name of Object.keys(metafile.inputs)) {
  const found = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(name);
  if (found) packages.add(found[1]);
}
let text = "The page of sbus web contains the following packages.\n";
for (const name of [...packages].sort()) {
  const directory = path.join(here, "node_modules", name);
  const { version, license, homepage } = JSON.parse(await readFile(path.join(directory, "package.json"), "utf8"));
  const words = await readFile(path.join(directory, "LICENSE"), "utf8");
  text += `\n${"-".repeat(72)}\n${name} ${version} (${license})\n${homepage ?? ""}\n\n${words.trim()}\n`;
}
await writeFile(path.join(out, "THIRD-PARTY.txt"), text);
for (const file of ["app.js", "app.css"]) {
  console.log(`${file}: ${((await readFile(path.join(out, file))).length / 1024).toFixed(1)} KiB`);
}
console.log(`with ${[...packages].sort().join(", ")}, into ${path.relative(process.cwd(), out)}`);
