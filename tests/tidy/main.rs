//! Style as a test: lengths, SAFETY comments, banned words and who may know whom. Textual, and
//! therefore dependent on rustfmt's layout, which is the repository's anyway.

mod lexer;
mod links;
mod modules;
mod package;
mod ratchets;
mod signatures;

use regex::Regex;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const MAX_COLUMNS: usize = 100;
const MAX_LINES: usize = 800;
const MAX_FUNCTION_LINES: usize = 70;

/// Functions that are longer than that, with their length today: a ratchet. Shorten, never add.
const LONG_FUNCTIONS: &[(&str, &str, usize)] = &[];

/// The parts of the crate that a module of src/ may use besides the error type. Missing names may
/// use nothing.
const LAYERS: &[(&str, &[&str])] = &[
    ("interrupt", &["terminal"]),
    ("gguf", &["interrupt"]),
    ("quant", &["gguf"]),
    ("simd", &["gguf", "quant"]),
    ("backend", &["gguf", "quant", "simd"]),
    // Only experts/vram uses the backend: device memory and streams.
    ("experts", &["backend", "gguf", "interrupt", "policy"]),
    ("model", &["backend", "experts", "gguf", "interrupt", "policy", "quant", "simd"]),
    ("forward", &["backend", "experts", "gguf", "interrupt", "model", "policy", "quant", "simd"]),
    ("tokenizer", &["gguf"]),
    ("chat", &["gguf", "tokenizer"]),
    ("sample", &["gguf", "tokenizer"]),
    (
        "convert",
        &[
            "backend",
            "experts",
            "gguf",
            "interrupt",
            "model",
            "quant",
            "simd",
            "terminal",
            "tokenizer",
        ],
    ),
    (
        "engine",
        &[
            "backend",
            "experts",
            "forward",
            "gguf",
            "interrupt",
            "model",
            "policy",
            "quant",
            "sample",
            "simd",
            "tokenizer",
        ],
    ),
    ("policy", &[]),
    // Lines and bars on stderr.
    ("terminal", &[]),
    // What a machine gives to whatever runs on it.
    ("machine", &["backend", "experts", "gguf", "simd"]),
    // Files of others, by name: what is in them is no matter of its.
    ("hub", &["interrupt"]),
    // It drives the tier's state machine, which holds no memory and does no I/O.
    ("trace", &["experts", "policy"]),
    ("train", &["policy"]),
    ("server", &["chat", "engine", "gguf", "interrupt", "sample", "tokenizer"]),
];

/// Rooms of src/backend.
const BACKENDS: &[&str] = &["cpu", "cuda", "gpu", "ops", "selftest"];

/// Folders that may use these rooms of src/backend only.
const BACKENDS_USED: &[(&str, &[&str])] = &[
    ("convert/", &["ops"]),
    ("src/model/", &["ops"]),
    ("src/backend/cpu/", &["cpu", "ops"]),
    ("src/backend/gpu/", &["cuda", "gpu", "ops"]),
    ("src/backend/ops/", &["ops"]),
];

/// Modules that anyone may use or that may use anyone.
const FREE: &[&str] = &["cancel", "error", "meter", "units", "cli", "lib", "main"];

struct Source {
    /// Relative to the repository, with slashes.
    path: String,
    text: String,
}

impl Source {
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(i, line)| (i + 1, line))
    }

    fn extension(&self) -> &str {
        self.path.rsplit('.').next().unwrap_or_default()
    }

    fn is_rust(&self) -> bool {
        self.extension() == "rs"
    }

    /// Code that goes into the program: without the tests at the end of the file.
    fn program(&self) -> &str {
        self.text.split("\n#[cfg(test)]").next().unwrap_or_default()
    }

    fn in_program(&self) -> bool {
        self.path.starts_with("src/") || self.path.starts_with("convert/")
    }

    /// `gguf` for src/gguf/file.rs, `error` for src/error.rs, `convert` for convert/x.rs.
    fn module(&self) -> &str {
        let inner = self.path.strip_prefix("src/").unwrap_or(&self.path);
        inner.split('/').next().unwrap_or_default().trim_end_matches(".rs")
    }
}

/// Our own source files: Rust, Python, CUDA and the descriptors.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pending: Vec<PathBuf> = ["src", "convert", "kernels", "models", "tests", "bench"]
        .iter()
        .map(|dir| root.join(dir))
        .filter(|dir| dir.exists())
        .collect();
    let mut out = Vec::new();
    while let Some(dir) = pending.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
            if path.is_dir() {
                if !["target", "ptx"].iter().any(|skip| path.ends_with(skip)) {
                    pending.push(path);
                }
            } else if ["rs", "py", "cu", "cuh", "toml"].contains(&extension) {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
                out.push(Source { path: name, text: fs::read_to_string(&path).unwrap() });
            }
        }
    }
    assert!(out.len() > 20, "the source files were not found");
    out.sort_by(|a, b| a.path.cmp(&b.path));
    out
}

fn rust_sources() -> impl Iterator<Item = Source> {
    sources().into_iter().filter(Source::is_rust)
}

/// Fails with all faults at once.
fn report(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}\n", faults.join("\n"));
}

/// Prints past the test harness, which keeps the output of tests that pass.
fn ask(text: &str) {
    // A closed stderr is no fault of the sources.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The code of a line: no comment. String literals stay.
fn code(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

#[test]
fn lines_and_files_are_short() {
    let mut faults = Vec::new();
    for source in sources() {
        let n = source.text.lines().count();
        if n > MAX_LINES {
            faults.push(format!("{}: {n} lines, at most {MAX_LINES}", source.path));
        }
        // Descriptors are tables: a row is a line.
        for (no, line) in source.lines().filter(|_| !source.path.ends_with(".toml")) {
            let columns = line.chars().count();
            if columns > MAX_COLUMNS {
                faults.push(format!("{}:{no}: {columns} columns", source.path));
            }
            if line.ends_with([' ', '\t']) {
                faults.push(format!("{}:{no}: white space at the end", source.path));
            }
        }
    }
    report(faults);
}

/// (name, lines) of each function. rustfmt puts the closing brace at the indentation of `fn`.
fn functions(source: &Source) -> Vec<(String, usize)> {
    let visibility = r"^(\s*)(?:pub(?:\([a-z: ]+\))? )?";
    let qualifiers = r#"(?:default |const |async |unsafe |extern "\w+" )*"#;
    let head = Regex::new(&format!(r"{visibility}{qualifiers}fn (\w+)")).unwrap();
    let lines: Vec<&str> = source.text.lines().collect();
    let mut out = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(found) = head.captures(line) else { continue };
        let (close, open) = (format!("{}}}", &found[1]), format!("{}{{", &found[1]));
        // A body on one line, or a signature without one.
        let one_line = |line: &str| line.ends_with(';') || line.trim_end().ends_with('}');
        let mut end = start;
        while end < lines.len() && !(one_line(lines[end]) && end == start) && lines[end] != close {
            let signature_end = lines[end].starts_with(&found[1]) && lines[end].ends_with(';');
            if signature_end && !lines[start..=end].iter().any(|l| l.ends_with('{') || **l == open)
            {
                break;
            }
            end += 1;
        }
        out.push((found[2].to_owned(), end - start + 1));
    }
    out
}

#[test]
fn functions_are_short() {
    let mut faults = Vec::new();
    let mut listed: Vec<_> = LONG_FUNCTIONS.to_vec();
    for source in rust_sources() {
        for (name, lines) in functions(&source) {
            let known = listed.iter().position(|(p, f, _)| *p == source.path && *f == name);
            match known.map(|at| listed.swap_remove(at).2) {
                Some(allowed) if lines == allowed => {}
                Some(allowed) if lines < allowed && lines > MAX_FUNCTION_LINES => {
                    faults.push(format!("{}: {name}: list it with {lines} lines", source.path));
                }
                Some(allowed) if lines < allowed => {
                    faults.push(format!("{}: {name}: need not be listed", source.path));
                }
                None if lines <= MAX_FUNCTION_LINES => {}
                _ => faults.push(format!("{}: {name}: {lines} lines", source.path)),
            }
        }
    }
    faults
        .extend(listed.iter().map(|(path, name, _)| format!("{path}: {name} is gone: unlist it")));
    report(faults);
}

#[test]
fn function_lengths_are_measured_right() {
    let text = "fn a() {}\nimpl X {\n    pub fn b(\n        x: u8,\n    ) -> u8 {\n        x\n    \
                }\n\n    fn c(&self);\n}\npub const fn d() -> u8 {\n    1\n}\n";
    let source = Source { path: "x.rs".into(), text: text.into() };
    let found: Vec<_> = functions(&source);
    let expected = [("a", 1), ("b", 5), ("c", 1), ("d", 3)];
    assert_eq!(found, expected.map(|(name, n)| (name.to_owned(), n)));
}

/// Whether the comment directly above line `at` (attributes and the statement's own first lines
/// between) holds `word`.
fn comment_above_says(lines: &[&str], at: usize, word: &str) -> bool {
    let is_comment = |line: &str| line.trim_start().starts_with("//");
    let mut above = lines[..at].iter().rev();
    let mut passed = 0;
    for line in above.by_ref() {
        if is_comment(line) {
            if line.contains(word) {
                return true;
            }
            break;
        }
        let trimmed = line.trim();
        let attribute = trimmed.starts_with("#[") || trimmed.ends_with(")]");
        let statement_goes_on = !trimmed.is_empty() && !trimmed.ends_with([';', '}', '{']);
        passed += 1;
        if !attribute && (!statement_goes_on || passed > 4) {
            return false;
        }
    }
    above.take_while(|line| is_comment(line)).any(|line| line.contains(word))
}

#[test]
fn unsafe_code_says_why_it_is_sound() {
    let mut faults = Vec::new();
    let block = Regex::new(r"\bunsafe (\{|impl\b)").unwrap();
    let function = Regex::new(r"\bpub(\([a-z: ]+\))? (const )?unsafe (extern \S+ )?fn\b").unwrap();
    for source in rust_sources().filter(|s| !s.path.starts_with("tests/tidy/")) {
        let lines: Vec<&str> = source.text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            if block.is_match(code(line)) && !comment_above_says(&lines, at, "SAFETY:") {
                faults.push(format!("{}:{}: no SAFETY comment above", source.path, at + 1));
            }
            if function.is_match(code(line)) && !comment_above_says(&lines, at, "# Safety") {
                faults.push(format!("{}:{}: no `# Safety` section", source.path, at + 1));
            }
        }
    }
    report(faults);
}

#[test]
fn doc_comments_begin_with_their_subject() {
    let bad = Regex::new(r"^\s*//[/!] (?:The same|As|Those|It|What|One that)\b").unwrap();
    let mut faults = Vec::new();
    for source in rust_sources().filter(Source::in_program) {
        let mut is_first = true;
        for (no, line) in source.lines() {
            if is_first && bad.is_match(line) {
                faults.push(format!("{}:{no}: the noun is missing: {}", source.path, line.trim()));
            }
            is_first = !line.trim_start().starts_with("//");
        }
    }
    report(faults);
}

#[test]
fn banned_words_do_not_occur() {
    // In halves, so that this file passes its own test.
    let anywhere = [
        ("db", "g!("),
        ("to", "do!("),
        ("unimple", "mented!("),
        ("for", " now"),
        ("FIX", "ME"),
        ("XX", "X"),
    ];
    // stdout carries text or JSON through cli::out; these panic when the reader has gone.
    let in_program = [("print", "ln!("), ("prin", "t!(")];
    let in_words = |list: &[(&str, &str)]| {
        let words: Vec<_> = list.iter().map(|(a, b)| regex::escape(&format!("{a}{b}"))).collect();
        Regex::new(&format!(r"\b(?:{})", words.join("|"))).unwrap()
    };
    let (anywhere, in_program) = (in_words(&anywhere), in_words(&in_program));
    let mut faults = Vec::new();
    for source in sources() {
        for (no, line) in source.lines() {
            if let Some(found) = anywhere.find(line) {
                faults.push(format!("{}:{no}: {:?}", source.path, found.as_str()));
            }
        }
        if source.is_rust() && source.in_program() {
            let faulty = source.program().lines().filter(|l| in_program.is_match(code(l)));
            faults
                .extend(faulty.map(|l| format!("{}: stdout by macro: {}", source.path, l.trim())));
        }
    }
    report(faults);
}

/// Modules of the crate that a file names: `use crate::{a, b::c}`, `crate::a::b`.
fn modules_used(text: &str) -> Vec<String> {
    let text: String = text.lines().map(|line| code(line).trim()).collect::<Vec<_>>().join(" ");
    let path = Regex::new(r"\bcrate::(\w+|\{)").unwrap();
    let word = Regex::new(r"^\s*(\w+)").unwrap();
    let mut out = Vec::new();
    for found in path.captures_iter(&text) {
        let whole = found.get(0).unwrap();
        if &found[1] != "{" {
            out.push(found[1].to_owned());
            continue;
        }
        // The list's own items: what stands in inner braces belongs to them.
        let (mut depth, mut item) = (0, String::new());
        for c in text[whole.end()..].chars() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                _ => {}
            }
            if c == ',' && depth == 0 {
                out.extend(word.captures(&std::mem::take(&mut item)).map(|w| w[1].to_owned()));
            } else {
                item.push(c);
            }
        }
        out.extend(word.captures(&item).map(|w| w[1].to_owned()));
    }
    out
}

#[test]
fn knowledge_goes_one_way() {
    let mut faults = Vec::new();
    for source in rust_sources().filter(Source::in_program) {
        let module = source.module();
        if FREE.contains(&module) {
            continue;
        }
        let allowed = LAYERS.iter().find(|(name, _)| *name == module).map(|(_, allowed)| *allowed);
        let Some(allowed) = allowed else {
            faults.push(format!("{}: module {module} has no place in LAYERS", source.path));
            continue;
        };
        for used in modules_used(source.program()) {
            // What is no module is a type or a macro of the crate's root.
            let is_module = used == "cli" || LAYERS.iter().any(|(name, _)| *name == used);
            if is_module && used != module && !allowed.contains(&used.as_str()) {
                faults.push(format!("{}: {module} must not know {used}", source.path));
            }
        }
    }
    report(faults);
}

/// Rooms of src/backend that a file names: `use crate::backend::{a, b::c}`.
fn backends_used(text: &str) -> Vec<String> {
    let names = modules_used(&text.replace("crate::backend::", "crate::"));
    names.into_iter().filter(|name| BACKENDS.contains(&name.as_str())).collect()
}

#[test]
fn operation_types_are_in_one_place() {
    let mut faults = Vec::new();
    for source in rust_sources().filter(Source::in_program) {
        for (_, allowed) in BACKENDS_USED.iter().filter(|(dir, _)| source.path.starts_with(dir)) {
            for used in backends_used(source.program()) {
                if !allowed.contains(&used.as_str()) {
                    faults.push(format!("{}: must not know backend::{used}", source.path));
                }
            }
        }
    }
    report(faults);
}

/// The files of src/forward/gpu from the bottom up: a file may use those before it.
const GPU_PASS: &[&str] = &[
    // Kernels, weights and buffers.
    "ops",
    "acts",
    "upload",
    "weights",
    "bump",
    "pack",
    "index_layers",
    "mixer_layout",
    "compressed_layers",
    "layers",
    "expander",
    "cache/copies",
    "cache",
    "cache/positions",
    "cache/states",
    "workspace",
    "experts",
    "device_model",
    // What passes keep.
    "placement/attention_timer",
    "placement/cpu_timer",
    "placement/in_place_timer",
    "placement",
    "expert_parallel/staged_copy",
    "expert_parallel/table_upload",
    "expert_parallel/workspace",
    "expert_parallel/share",
    "expert_parallel/peer",
    "expert_parallel",
    "decode_pipeline/slot",
    "decode_pipeline/queue",
    "hybrid_moe/in_place",
    "hybrid_moe/division",
    "hybrid_moe/call",
    "device_moe/route",
    "steps",
    "devices",
    "pass",
    "mixer",
    // Stages of a layer.
    "halves",
    "marks",
    "streams",
    "ngrams",
    "cache_rows",
    "graphs",
    "attend",
    "indexer",
    "attention",
    "cross_attention",
    "layer_inputs",
    "expanded",
    "mla",
    "compressed",
    "gated_delta",
    "kda",
    "recurrent",
    "moe",
    "logits",
    "hybrid_moe",
    "device_moe/answer",
    "decode_pipeline",
    "device_moe",
    "observe",
    // The layer, the loop over layers, the model.
    "layer",
    "token_graph",
    "layer_loop",
    "",
];

/// The file of src/forward/gpu that a path below `crate::forward::gpu::` names.
fn gpu_file(path: &str) -> String {
    let is_module = |part: &&str| part.starts_with(|c: char| c.is_ascii_lowercase());
    let parts: Vec<&str> = path.split("::").take_while(is_module).collect();
    let longest = (0..=parts.len()).rev().map(|n| parts[..n].join("/"));
    longest.clone().find(|file| GPU_PASS.contains(&file.as_str())).unwrap_or_default()
}

#[test]
fn the_gpu_pass_has_no_back_arrow() {
    let all = rust_sources().filter(|s| s.path.starts_with("src/forward/gpu/"));
    let file = |path: &str| {
        let file = path.strip_prefix("src/forward/gpu/").unwrap().trim_end_matches(".rs");
        file.trim_end_matches("mod").trim_end_matches('/').to_owned()
    };
    let all: Vec<(String, Source)> = all.map(|source| (file(&source.path), source)).collect();
    let rank = |file: &str| GPU_PASS.iter().position(|known| *known == file);
    let mut faults = Vec::new();
    for name in GPU_PASS.iter().filter(|name| all.iter().all(|(file, _)| file != *name)) {
        faults.push(format!("GPU_PASS: src/forward/gpu has no file {name:?}"));
    }
    let import = Regex::new(r"\bcrate::forward::gpu::([\w:]*\w|\{)").unwrap();
    let method = Regex::new(r"(?m)^    (?:pub )?(?:unsafe )?fn (\w+)").unwrap();
    let call = Regex::new(r"\b(?:self|cx)\s*\.(\w+)\(").unwrap();
    let has_stage = |source: &Source| source.program().contains("GpuPass<'");
    let stages = all.iter().filter(|(_, source)| source.program().contains("> GpuPass<'"));
    let methods: Vec<(&str, usize)> = stages
        .filter_map(|(file, source)| Some((rank(file)?, source)))
        .flat_map(|(rank, source)| {
            let found = method.captures_iter(source.program());
            found.map(move |found| (found.get(1).unwrap().as_str(), rank))
        })
        .collect();
    for (file, source) in &all {
        let Some(own) = rank(file) else {
            faults.push(format!("{}: it has no place in GPU_PASS", source.path));
            continue;
        };
        let program: String =
            source.program().lines().flat_map(|line| [code(line), "\n"]).collect();
        for found in import.captures_iter(&program) {
            let used = gpu_file(&found[1]);
            if &found[1] == "{" || rank(&used).is_none_or(|used| used >= own) {
                faults.push(format!("{}: must not use {}", source.path, &found[1]));
            }
        }
        if program.contains("super::") {
            faults.push(format!("{}: write crate::forward::gpu for super", source.path));
        }
        if !has_stage(source) && !program.contains("cx: &mut GpuPass") {
            continue;
        }
        for found in call.captures_iter(&program) {
            let above = methods.iter().find(|(name, rank)| *name == &found[1] && *rank > own);
            if let Some((name, rank)) = above {
                faults.push(format!("{}: calls {name} of {}", source.path, GPU_PASS[*rank]));
            }
        }
    }
    report(faults);
}

#[test]
fn paths_of_the_gpu_pass_name_files() {
    let found = ["acts::GpuActs", "hybrid_moe::call::LayerCall", "placement::Placer", "GpuCache"];
    assert_eq!(found.map(gpu_file), ["acts", "hybrid_moe/call", "placement", ""]);
}

#[test]
fn uses_are_found_in_all_spellings() {
    let text = "use crate::gguf::Gguf;\nuse crate::{Error,\n    quant::{a, b}, simd};\nfn f() { \
                crate::model::x(); } // crate::cli";
    assert_eq!(modules_used(text), ["gguf", "Error", "quant", "simd", "model"]);
    let text = "use crate::backend::cpu::Cpu;\nuse crate::backend::{gpu::Device, ops};";
    assert_eq!(backends_used(text), ["cpu", "gpu", "ops"]);
}

/// Architectures, by their descriptors' file names.
fn architectures() -> Vec<String> {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let names = fs::read_dir(models).unwrap().map(|e| e.unwrap().file_name());
    let names = names.filter_map(|n| n.to_str()?.strip_suffix(".toml").map(str::to_owned));
    // Those are not architectures, but what architectures inherit.
    names.filter(|name| !name.starts_with("common")).collect()
}

#[test]
fn architectures_are_data() {
    let loader = "src/model/descriptor/mod.rs";
    let mut faults = Vec::new();
    let all = sources();
    let loader_text = &all.iter().find(|s| s.path == loader).unwrap().text;
    for name in architectures() {
        if !loader_text.contains(&format!("source!(\"{name}\")")) {
            faults.push(format!("{loader} does not list models/{name}.toml"));
        }
        let named = Regex::new(&format!(r#""{}["./]"#, regex::escape(&name))).unwrap();
        for source in all.iter().filter(|s| s.path.starts_with("src/") && s.path != loader) {
            // `tokenizer.ggml.model` calls SentencePiece algorithms by models' names, and
            // `tokenizer.ggml.pre` the pre-tokenizers.
            let is_algorithm = ["flint", "gemma4", "llama"].contains(&name.as_str());
            let allowed = is_algorithm && source.path.starts_with("src/tokenizer/")
                || source.path == "src/tokenizer/pre.rs";
            // `--reasoning-format` calls a format by a model's name.
            let allowed = allowed || source.path == "src/cli/reasoning.rs";
            let allowed = allowed || source.path == "src/server/api/chat.rs";
            // Formats of tool calls and of reasoning are called by models' names.
            let allowed = allowed || source.path.starts_with("src/chat/");
            let faulty = source.program().lines().filter(|l| named.is_match(code(l)));
            let faulty = faulty.filter(|_| !allowed);
            faults.extend(faulty.map(|l| format!("{}: names {name}: {}", source.path, l.trim())));
        }
    }
    report(faults);
}

#[test]
fn no_path_of_a_machine_is_in_the_tree() {
    let paths = ["/ro".to_owned() + "ot/", "/ho".to_owned() + "me/", "/wo".to_owned() + "rk/"];
    let mut faults = Vec::new();
    for source in sources() {
        for (no, line) in source.lines() {
            if paths.iter().any(|p| line.contains(p.as_str())) {
                faults.push(format!("{}:{no}: {}", source.path, line.trim()));
            }
        }
    }
    report(faults);
}
