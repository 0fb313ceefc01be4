//! `moeba` alone, on a terminal: what this machine has, which models are on it, and the lines to
//! type next. Ten lines at most.

use super::{bundled, figures, out};
use crate::Result;
use crate::backend::cuda;
use crate::backend::gpu::DeviceInfo;
use crate::engine::plan::memory;
use crate::hub::{self, Config, Hub};
use crate::machine::memory::Memory;
use crate::units::size;
use std::fs;
use std::path::Path;

/// Models with a line each; the others are counted.
const N_SHOWN: usize = 3;

/// A model that can be run as it is.
struct Model {
    /// The arguments that name it.
    arguments: String,
    n_bytes: u64,
}

/// The machine, as far as it says.
struct Machine {
    n_cores: usize,
    memory: Option<u64>,
    free: Option<u64>,
    /// Names and memory of GPUs, or why there is none.
    gpus: std::result::Result<Vec<(String, u64)>, String>,
}

pub fn show() -> Result<()> {
    out::line(&text(&machine(), &models(Path::new("."))))
}

fn machine() -> Machine {
    let gpu = |info: &DeviceInfo| (info.name.clone(), info.memory_bytes as u64);
    let gpus = cuda::devices().map(|all| all.iter().map(|device| gpu(device.info())).collect());
    Machine {
        n_cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
        memory: Memory::read().total_bytes,
        free: memory::available_bytes(),
        gpus: gpus.map_err(|why| why.to_string()),
    }
}

/// Files of the folder, downloads, and the bundled model.
fn models(folder: &Path) -> Vec<Model> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let bytes = |file: &&str| fs::metadata(folder.join(file)).map_or(0, |meta| meta.len());
    let of_folder = hub::models_of(&names).into_iter().map(|(_, file)| Model {
        arguments: quoted(file),
        n_bytes: hub::files_of(&names, file).iter().map(bytes).sum(),
    });
    let downloaded = Config::from_env().and_then(|config| Hub::new(config).list());
    let downloaded = downloaded.unwrap_or_default().into_iter().map(|model| Model {
        arguments: format!("-hf {}", model.name().escape_debug()),
        n_bytes: model.n_bytes,
    });
    let bundled = bundled::find().map(|path| Model {
        arguments: bundled::NAME.into(),
        n_bytes: fs::metadata(path).map_or(0, |meta| meta.len()),
    });
    of_folder.chain(downloaded).chain(bundled).collect()
}

/// A file's name as a shell takes it.
fn quoted(file: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "._-+/".contains(c);
    match file.chars().all(is_plain) && !file.starts_with('-') {
        true => file.to_owned(),
        false => format!("./{file:?}"),
    }
}

fn text(machine: &Machine, models: &[Model]) -> String {
    let mut lines = vec![format!("moeba {} on {}", super::version(), described(machine))];
    match models {
        [] => lines.push("There is no model here yet.".into()),
        _ => lines.push("Models that are here:".into()),
    }
    let shown = &models[..models.len().min(N_SHOWN)];
    let width = shown.iter().map(|model| model.arguments.len()).max().unwrap_or_default();
    for Model { arguments, n_bytes } in shown {
        let place = match machine.free {
            Some(free) if *n_bytes > free => "experts come from disk",
            Some(_) => "fits in memory",
            None => "",
        };
        let line = format!("  {arguments:<width$}  {:>10}  {place}", size(*n_bytes));
        lines.push(line.trim_end().to_owned());
    }
    if models.len() > shown.len() {
        let n = figures::count(models.len() - shown.len());
        lines.push(format!("  and {n} more; `moeba list` shows the downloaded ones"));
    }
    let mut row = |what: &str, line: &str| lines.push(format!("{what:<17}  {line}"));
    if let Some(Model { arguments, .. }) = models.first() {
        row("Ask a question:", &format!("moeba run {arguments} -p \"What is a branch?\""));
        row("A page and APIs:", &format!("moeba serve {arguments}"));
    }
    row("Download a model:", "moeba run -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M");
    row("All commands:", "moeba --help");
    lines.join("\n")
}

/// `2 cores, 21.0 of 23.5 GiB of memory free, without a GPU`
fn described(machine: &Machine) -> String {
    let mut parts = vec![figures::counted(machine.n_cores, "core")];
    parts.extend(match (machine.free, machine.memory) {
        (Some(free), Some(all)) => Some(format!("{} of {} memory free", size(free), size(all))),
        (Some(free), None) => Some(format!("{} of memory free", size(free))),
        (None, Some(all)) => Some(format!("{} of memory", size(all))),
        (None, None) => None,
    });
    match &machine.gpus {
        Ok(gpus) => parts.extend(gpus.chunk_by(|a, b| a == b).map(alike)),
        Err(_) if !cuda::has_driver() => parts.push("no GPU".into()),
        Err(why) => parts.push(format!("no GPU: {why}")),
    }
    parts.join(", ")
}

/// `8 × NVIDIA H200 with 140.00 GiB`
fn alike(gpus: &[(String, u64)]) -> String {
    let times = if gpus.len() > 1 { format!("{} × ", gpus.len()) } else { String::new() };
    gpus.first().map_or_else(String::new, |(name, n)| format!("{times}{name} with {}", size(*n)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(arguments: &str, n_bytes: u64) -> Model {
        Model { arguments: arguments.into(), n_bytes }
    }

    #[test]
    fn ten_lines_name_what_is_here() {
        let machine = Machine {
            n_cores: 2,
            memory: Some(24 << 30),
            free: Some(21 << 30),
            gpus: Ok(vec![("NVIDIA H200".into(), 141 << 30)]),
        };
        assert_eq!(alike(&vec![("X".into(), 1 << 30); 8]), "8 × X with 1.00 GiB");
        let none = text(&machine, &[]);
        assert!(none.contains("no model here yet") && !none.contains("moeba serve"), "{none}");
        let first = "2 cores, 21.00 GiB of 24.00 GiB memory free, NVIDIA H200 with 141.00 GiB";
        assert!(none.lines().next().unwrap().ends_with(first), "{none}");
        let many = [
            model("small.gguf", 1 << 30),
            model("-hf a/big:Q4_K_M", 40 << 30),
            model("demo", 17 << 20),
            model("x.gguf", 1),
            model("y.gguf", 1),
        ];
        let text = text(&machine, &many);
        assert_eq!(text.lines().count(), 10, "{text}");
        for words in [
            "  small.gguf          1.00 GiB  fits in memory\n",
            "  -hf a/big:Q4_K_M   40.00 GiB  experts come from disk\n",
            "  and 2 more; ",
            "moeba run small.gguf -p \"What is a branch?\"\n",
            "moeba serve small.gguf\n",
        ] {
            assert!(text.contains(words), "no {words:?} in\n{text}");
        }
    }

    #[test]
    fn files_of_the_folder_are_models() {
        let dir = tempfile::tempdir().unwrap();
        for (name, n) in [("a b.gguf", 3), ("m-00001-of-00002.gguf", 5), ("notes.txt", 7)] {
            fs::write(dir.path().join(name), vec![0; n]).unwrap();
        }
        fs::write(dir.path().join("m-00002-of-00002.gguf"), [0; 6]).unwrap();
        let found = models(dir.path());
        let found: Vec<_> = found.iter().map(|m| (m.arguments.as_str(), m.n_bytes)).collect();
        assert_eq!(found[..2], [("./\"a b.gguf\"", 3), ("m-00001-of-00002.gguf", 11)]);
    }
}
