//! Several models behind one server: those of a folder, or of the hub's cache.

use super::hub::{self, HubArgs};
use super::model::Model;
use super::serve::Args;
use super::values::{self, Parsed};
use crate::engine::plan::{memory, ram};
use crate::engine::{Engine, EngineOptions, Loading, usual_body_bytes};
use crate::hub::{Hub, models_of};
use crate::server::{Downloads, Library, Limits, Listed, Loaded, Need, Pulled, Shelf};
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Models")]
pub struct LibraryArgs {
    /// Folder of models: its GGUF files, and folders with one or with the parts of one. A request's
    /// `model` names the file without its ending, or the folder. Without this and without MODEL:
    /// all downloaded models
    #[arg(long, value_name = "DIR", env = "MOEBA_MODELS_DIR")]
    models_dir: Option<PathBuf>,
    /// Models that are loaded at a time; 0: as many as memory holds
    #[arg(long, value_name = "N", default_value = "0", value_parser = models_max)]
    #[arg(env = "MOEBA_MODELS_MAX")]
    models_max: usize,
    /// Seconds after which an idle model leaves memory; the next request loads it again. -1: never,
    /// unless another model needs its memory
    #[arg(long, value_name = "N", default_value = "-1", value_parser = idle_seconds)]
    sleep_idle_seconds: i64,
    /// Let clients download models (/api/pull) and delete downloaded ones (/api/delete)
    #[arg(long)]
    allow_pull: bool,
}

fn models_max(text: &str) -> Parsed<usize> {
    values::integer(text, 0, 1000)
}

fn idle_seconds(text: &str) -> Parsed<i64> {
    values::integer(text, -1, 1_000_000_000)
}

/// Models for whose contexts memory is left, where flags do not say how long they are.
const N_MODELS: usize = 4;

impl LibraryArgs {
    fn keep(&self) -> Option<Duration> {
        u64::try_from(self.sleep_idle_seconds).ok().map(Duration::from_secs)
    }
}

impl Args {
    /// Whether there may be several models: all names are else those of one.
    pub fn has_several(&self) -> bool {
        self.library.models_dir.is_some() || !self.model.is_given()
    }

    /// Whether models come and go.
    pub fn has_library(&self) -> bool {
        self.has_several() || self.library.keep().is_some()
    }

    /// Fails where a flag has no sense with several models, or with one.
    pub fn check_library(&self) -> Result<()> {
        let wrong = |why: &str| Err(Error::Usage(why.into()));
        let LibraryArgs { models_max, allow_pull, .. } = self.library;
        let is_several = self.has_several();
        match () {
            _ if !is_several && models_max > 0 => {
                wrong("--models-max: there is one model: leave it out, or add --models-dir")
            }
            _ if !is_several && allow_pull => wrong(
                "--allow-pull: the server has one model: leave MODEL out, or add --models-dir",
            ),
            _ if is_several && self.ray.is_on() => wrong("--ray: name one MODEL"),
            _ if is_several && self.load.kv_disk.is_some() => {
                wrong("--kv-disk: the folder is one model's: name one MODEL, without --models-dir")
            }
            _ if is_several && !self.batch.options(0, None).adapters.is_empty() => {
                wrong("--lora: an adapter is one model's: name one MODEL, without --models-dir")
            }
            _ if !self.model.is_given() && !self.listen.alias.is_empty() => {
                wrong("--alias: name the MODEL that the alias is for")
            }
            _ => Ok(()),
        }
    }
}

/// The models of a server, and how they are loaded.
struct Shelved {
    args: Arc<Args>,
    /// The model that was named.
    first: Option<Listed>,
    cache: Option<Hub>,
    /// Memory of all models together.
    memory: Option<u64>,
    /// Options of models as they were planned.
    planned: Mutex<HashMap<String, (Listed, EngineOptions)>>,
}

/// The models of a server as it takes them, and whether one is to be loaded at once.
pub fn shelf(args: &Arc<Args>) -> Result<Shelf> {
    if args.has_several() {
        args.spec.check_is_for_one()?;
    }
    let first = args.model.is_given().then(|| args.model.resolve()).transpose()?;
    let first = first.map(|model| Listed::new(stem(&model.path), model.path));
    let library = &args.library;
    let has_cache = args.has_several() && (library.models_dir.is_none() || library.allow_pull);
    let cache = has_cache.then(|| args.model.hub().hub()).transpose()?;
    let available = memory::available_bytes();
    let body_bytes = usual_body_bytes(args.access.body_ram, available, None);
    let memory = available.map(|available| available.saturating_sub(body_bytes));
    let first_path = first.as_ref().map(|model| model.path.clone());
    let shelved = Shelved { args: args.clone(), first, cache, memory, planned: Mutex::default() };
    if let Some(folder) = &library.models_dir {
        std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
    }
    if shelved.list().is_empty() && !library.allow_pull {
        return Err(Error::Usage(shelved.nothing()));
    }
    let limits = Limits {
        most: if library.models_max > 0 { library.models_max } else { usize::MAX },
        bytes: memory.map(ram::room),
        expert_bytes: match args.batch.weights.experts.ram {
            ram::RamBudget::Bytes(bytes) => Some(bytes),
            _ => None,
        },
        n_waiting: args.load.queue.max(1),
        keep: library.keep(),
    };
    Ok(Shelf {
        library: Box::new(shelved),
        limits,
        first: first_path,
        is_single: !args.has_several(),
        body_bytes,
        patience: super::serve::time(args.load.queue_timeout),
    })
}

impl Shelved {
    /// The sentence for a server without a model.
    fn nothing(&self) -> String {
        match &self.args.library.models_dir {
            Some(folder) => format!("{}: the folder has no GGUF file", folder.display()),
            None => "no MODEL is given, and none is downloaded: give one, or --models-dir DIR, or \
                     --allow-pull"
                .into(),
        }
    }

    fn options(&self, model: &Listed) -> Result<EngineOptions> {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let known = planned.get(&model.name).filter(|(known, _)| known == model);
        if let Some((_, options)) = known {
            return Ok(options.clone());
        }
        drop(planned);
        self.args.engine_options(&self.at(model), self.memory, self.n_models())
    }

    fn n_models(&self) -> usize {
        if self.args.has_several() { N_MODELS } else { 1 }
    }

    fn at(&self, model: &Listed) -> Model {
        self.args.model.at(&model.path)
    }
}

impl Library for Shelved {
    fn list(&self) -> Vec<Listed> {
        let mut all: Vec<Listed> = self.first.iter().map(fresh).collect();
        if let Some(folder) = &self.args.library.models_dir {
            all.extend(of_folder(folder));
        }
        let cached = self.cache.as_ref().map(Hub::list).transpose();
        let cached = cached.unwrap_or_else(|why| {
            log::warn!("the downloaded models cannot be listed: {why}");
            None
        });
        let cached = cached.into_iter().flatten();
        all.extend(cached.map(|model| Listed::new(model.name(), model.path)));
        let mut out: Vec<Listed> = Vec::new();
        for model in all {
            let is_there = |other: &Listed| other.name == model.name || other.path == model.path;
            if !out.iter().any(is_there) {
                out.push(model);
            }
        }
        out
    }

    fn need(&self, model: &Listed) -> Result<Need> {
        if !self.args.has_several() {
            return Ok(Need::default());
        }
        let options = self.options(model)?;
        let at = self.at(model);
        let plan = Engine::plan_of(&at.path, &at.options(&options))?;
        let (bytes, expert_bytes) = plan.resident_bytes();
        let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        planned.insert(model.name.clone(), (model.clone(), options));
        Ok(Need { bytes, expert_bytes, is_on_device: plan.device.is_some() })
    }

    fn load(&self, model: &Listed, progress: &mut dyn FnMut(Loading)) -> Result<Loaded> {
        let options = self.options(model)?;
        self.args.open(&self.at(model), &options, progress)
    }

    fn names(&self, model: &Listed) -> Vec<String> {
        let is_first = self.first.as_ref().is_some_and(|first| first.path == model.path);
        if is_first { self.args.listen.alias.clone() } else { Vec::new() }
    }

    fn hub(&self) -> Option<&dyn Downloads> {
        self.args.library.allow_pull.then_some(self)
    }
}

impl Downloads for Shelved {
    fn pull(&self, name: &str, progress: &mut dyn FnMut(Pulled<'_>) -> Result<()>) -> Result<()> {
        let hub: &HubArgs = self.args.model.hub();
        let wanted = hub::wanted(name.strip_suffix(":latest").unwrap_or(name))?;
        let mut step = |step: crate::hub::Step<'_>| {
            let crate::hub::Step { file, sha256: digest, done, total } = step;
            progress(Pulled { file, digest, done, total })
        };
        hub.hub()?.fetch(&wanted, &mut step).map(drop)
    }

    fn remove(&self, model: &Listed) -> Result<u64> {
        let cached = self.cache.as_ref().map(Hub::list).transpose()?.unwrap_or_default();
        let found = cached.iter().find(|cached| cached.path == model.path);
        let Some(cached) = found else {
            let why = "only downloaded models can be deleted";
            return Err(Error::Invalid(format!("{}: {why}", model.name)));
        };
        let mut wanted = hub::wanted(&cached.name())?;
        if wanted.quant.is_none() {
            let file = model.path.file_name().unwrap_or_default().to_string_lossy();
            wanted = wanted.with_file(&file).map_err(Error::Usage)?;
        }
        let hub = self.args.model.hub().hub()?;
        hub.remove(&wanted)
    }
}

/// A model as its file is now.
fn fresh(model: &Listed) -> Listed {
    Listed::new(model.name.clone(), model.path.clone())
}

/// The name of a model's file.
fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let found = models_of(&[&name]).first().map(|(stem, _)| (*stem).to_owned());
    found.unwrap_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned())
}

/// The models of a folder, by name: its files, and folders with files. A folder has the name of its
/// one model; of several each has its own behind it.
fn of_folder(folder: &Path) -> Vec<Listed> {
    let (files, folders) = entries(folder);
    let names: Vec<&str> = files.iter().map(String::as_str).collect();
    let model = |name: &str, file: &Path| Listed::new(name.to_owned(), file.to_owned());
    let mut out: Vec<Listed> =
        models_of(&names).into_iter().map(|(stem, file)| model(stem, &folder.join(file))).collect();
    for name in folders {
        let inner = folder.join(&name);
        let (files, _) = entries(&inner);
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        match &models_of(&files)[..] {
            [(_, file)] => out.push(model(&name, &inner.join(file))),
            all => {
                let each = all.iter();
                out.extend(each.map(|(s, f)| model(&format!("{name}/{s}"), &inner.join(f))));
            }
        }
    }
    out.sort_by(|a, b| a.name.cmp(&b.name));
    out
}

/// Names of the files and of the folders in a folder; hidden ones are left out.
fn entries(folder: &Path) -> (Vec<String>, Vec<String>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names.into_iter().partition(|name| !folder.join(name).is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_folders_are_models() {
        let dir = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        };
        for path in [
            "b.gguf",
            "notes.txt",
            ".hidden.gguf",
            "split-00002-of-00002.gguf",
            "split-00001-of-00002.gguf",
            "a/whatever-Q4_0.gguf",
            "a/mmproj-f16.gguf",
            "shards/m-00001-of-00002.gguf",
            "shards/m-00002-of-00002.gguf",
            "two/x.gguf",
            "two/y.gguf",
            "none/readme.md",
        ] {
            make(path);
        }
        let found = of_folder(dir.path());
        let found: Vec<(&str, &Path)> = found
            .iter()
            .map(|m| (m.name.as_str(), m.path.strip_prefix(dir.path()).unwrap()))
            .collect();
        let expected = [
            ("a", "a/whatever-Q4_0.gguf"),
            ("b", "b.gguf"),
            ("shards", "shards/m-00001-of-00002.gguf"),
            ("split", "split-00001-of-00002.gguf"),
            ("two/x", "two/x.gguf"),
            ("two/y", "two/y.gguf"),
        ];
        assert_eq!(found, expected.map(|(name, path)| (name, Path::new(path))));
        assert_eq!(stem(Path::new("/m/split-00001-of-00002.gguf")), "split");
        assert_eq!(stem(Path::new("/m/other.bin")), "other");
        assert!(of_folder(&dir.path().join("nowhere")).is_empty());
    }
}
