// Build src/swarmq/dashboard/static from web/src. The result depends on nothing but the files named in `sources`, so two
// people who build the same sources commit the same bytes; index.html records their digest for the tests.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "src", "swarmq", "dashboard", "static");

// Paths of all files that decide the bundle, relative to web/, with forward slashes, sorted by their UTF-8 bytes.
function sources() {
  const found = ["build.mjs", "package.json", "package-lock.json"];
  const walk = (folder) => {
    for (const entry of readdirSync(folder, { withFileTypes: true })) {
      const path = join(folder, entry.name);
      if (entry.isDirectory()) walk(path);
      else found.push(relative(here, path).split(sep).join("/"));
    }
  };
  walk(join(here, "src"));
  return found.sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)));
}

// SHA-256 over `path NUL content NUL` of each source; tests/unit/dashboard computes the same.
function digest() {
  const hash = createHash("sha256");
  for (const path of sources()) {
    hash.update(path).update("\0").update(readFileSync(join(here, path))).update("\0");
  }
  return hash.digest("hex");
}

function licences() {
  const parts = ["The dashboard's JavaScript and CSS contain these packages.\n"];
  for (const name of ["preact", "uplot"]) {
    const folder = join(here, "node_modules", name);
    const { version, license, homepage } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const text = readFileSync(join(folder, "LICENSE"), "utf8").replaceAll("\r\n", "\n").trim();
    parts.push(`${"=".repeat(72)}\n${name} ${version} (${license})${homepage ? `, ${homepage}` : ""}\n\n${text}\n`);
  }
  return parts.join("\n");
}

const options = {
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  logLevel: "info",
};

function finish() {
  const html = readFileSync(join(here, "src", "index.html"), "utf8").replace("{{sources}}", digest());
  writeFileSync(join(out, "index.html"), html);
  writeFileSync(join(out, "LICENSES.txt"), licences());
}

mkdirSync(out, { recursive: true });
if (process.argv.includes("--watch")) {
  const plugin = { name: "finish", setup: (build) => build.onEnd(finish) };
  const context = await esbuild.context({ ...options, plugins: [plugin] });
  await context.watch();
} else {
  await esbuild.build(options);
  finish();
  const sizes = ["index.html", "app.js", "app.css"].map((name) => gzipSync(readFileSync(join(out, name))).length);
  console.log(`${(sizes.reduce((a, b) => a + b, 0) / 1000).toFixed(1)} kB gzip in all`);
}
