//! From what a user asks for to a file on this machine.

use super::api::Api;
use super::choice::{Choice, choose};
use super::download::DownloadJob;
use super::http::Http;
use super::listing::RemoteFile;
use super::paths::RepoPaths;
use super::retry::{Failure, Try};
use super::snapshot::{self, Cached};
use super::{Config, Patience, RepoId, Wanted, url};
use crate::units::{at_least, at_most};
use crate::{Error, Result};
use rustix::fs::statvfs;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The progress of a download.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    pub file: &'a str,
    /// Its SHA-256, where the hub tells it.
    pub sha256: Option<&'a str>,
    /// Bytes that are there, and of all files that were not in the cache.
    pub done: u64,
    pub total: u64,
}

/// A download that has not begun.
pub struct Ahead<'a> {
    /// Bytes that are to come.
    pub n_bytes: u64,
    /// Bytes that the disk has room for, if that is known.
    pub free_bytes: Option<u64>,
    /// Bytes a second, by receiving some for this long and dropping them.
    pub rate: &'a dyn Fn(Duration) -> Option<f64>,
}

/// Asks whether a download may begin.
pub type Consent<'a> = &'a mut dyn FnMut(&Ahead) -> Result<bool>;

/// A hub and the cache of its files.
#[derive(Debug)]
pub struct Hub {
    config: Config,
}

impl Hub {
    pub fn new(config: Config) -> Hub {
        Hub { config }
    }

    fn paths(&self, repo: &RepoId) -> RepoPaths {
        RepoPaths::new(&self.config.cache, repo)
    }

    /// The first file of the model on this machine; what the cache lacks is downloaded, until
    /// `progress` fails. A hub that cannot be reached is done without where the cache has the
    /// model.
    pub fn fetch(
        &self,
        wanted: &Wanted,
        progress: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<PathBuf> {
        self.fetch_with_consent(wanted, &mut |_| Ok(true), progress)
    }

    /// [`Hub::fetch`] that downloads nothing without consent. Where that is denied, an older copy
    /// in the cache will do.
    pub fn fetch_with_consent(
        &self,
        wanted: &Wanted,
        consent: Consent<'_>,
        progress: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Result<PathBuf> {
        if self.config.offline {
            return self.cached(wanted)?.ok_or_else(|| {
                let cache = self.config.cache.display();
                Error::Invalid(format!(
                    "{wanted} is not cached in {cache}, and --offline forbids downloading it"
                ))
            });
        }
        match self.online(wanted, consent, progress) {
            Ok(path) => Ok(path),
            Err(Failure::Passing { why, .. } | Failure::Unreachable(why)) => {
                match self.cached(wanted) {
                    Ok(Some(path)) => {
                        log::warn!("{why}; using the cached copy of {wanted}");
                        Ok(path)
                    }
                    _ => Err(Error::Invalid(why)),
                }
            }
            Err(Failure::Lasting(e)) => Err(e),
        }
    }

    /// The file in the cache; sends no requests. An error names the files that are there instead.
    fn cached(&self, wanted: &Wanted) -> Result<Option<PathBuf>> {
        let paths = self.paths(&wanted.repo);
        let mut missed = None;
        for (commit, files) in self.snapshots(&paths)? {
            let names: Vec<&str> = files.iter().map(String::as_str).collect();
            match pick(&names, wanted, "the cache") {
                Ok(files) => return Ok(Some(paths.pointer(&commit, files[0]))),
                Err(e) => missed = missed.or(Some(e)),
            }
        }
        missed.map_or(Ok(None), Err)
    }

    /// The commits that the cache has models of, and all of their files.
    fn snapshots(&self, paths: &RepoPaths) -> Result<Vec<(String, Vec<String>)>> {
        let mut out = Vec::new();
        for commit in snapshot::commits(paths)? {
            let files = snapshot::files(paths, &commit)?;
            if files.iter().any(|name| name.ends_with(".gguf")) {
                out.push((commit, files));
            }
        }
        Ok(out)
    }

    fn online(
        &self,
        wanted: &Wanted,
        consent: Consent<'_>,
        progress: &mut dyn FnMut(Step<'_>) -> Result<()>,
    ) -> Try<PathBuf> {
        let http = Http::new(&self.config);
        // Where the cache has it, a hub that does not answer at once is done without.
        let attempts = match self.cached(wanted) {
            Ok(Some(_)) => 1,
            _ => self.config.patience.attempts,
        };
        let patience = Patience { attempts, ..self.config.patience };
        let api = Api { http: &http, endpoint: &self.config.endpoint, patience };
        let (repo, paths) = (&wanted.repo, self.paths(&wanted.repo));
        let commit = api.commit(repo)?;
        let listed = api.listing(repo, &commit)?;
        let names: Vec<&str> = listed.iter().map(|file| file.path.as_str()).collect();
        let picked = pick(&names, wanted, "the repository")?;
        let files: Vec<&RemoteFile> =
            picked.iter().filter_map(|path| listed.iter().find(|f| f.path == *path)).collect();

        let lacking = |file: &&&RemoteFile| snapshot::find(&paths, &commit, file).is_none();
        let missing: Vec<&RemoteFile> = files.iter().filter(lacking).copied().collect();
        let total = missing.iter().filter_map(|file| file.size).sum();
        let (n_bytes, free_bytes) = self.check_room(&paths, &missing)?;
        let url_of = |file: &RemoteFile| {
            let path = url::escape_path(&file.path);
            format!("{}/{repo}/resolve/{commit}/{path}", self.config.endpoint)
        };
        if let Some(first) = missing.first() {
            let rate = |time| {
                let mut config = self.config.clone();
                config.patience.stall = time;
                Http::new(&config).rate(&url_of(first), repo, time)
            };
            if !consent(&Ahead { n_bytes, free_bytes, rate: &rate })? {
                let older = self.cached(wanted).ok().flatten();
                let refused = || Error::Invalid(format!("{wanted} was not downloaded"));
                return Ok(older.ok_or_else(refused)?);
            }
        }
        let mut before = 0;
        for file in missing {
            let url = url_of(file);
            let (config, http, paths) = (&self.config, &http, &paths);
            let mut step = |done| {
                let (sha256, done) = (file.sha256(), before + done);
                progress(Step { file: &file.path, sha256, done, total })
            };
            DownloadJob { config, http, repo, paths, file, url }.run(&mut step)?;
            snapshot::link(paths, &commit, file)?;
            before += file.size.unwrap_or(0);
        }
        // Only now: a branch names what is whole.
        snapshot::set_branch(&paths, &commit)?;
        Ok(paths.pointer(&commit, picked[0]))
    }

    /// Says at once that a model will not fit the disk, and not after hours. Answers the bytes that
    /// are to come, and those that there is room for.
    fn check_room(&self, paths: &RepoPaths, files: &[&RemoteFile]) -> Result<(u64, Option<u64>)> {
        let there = |path: PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
        let needed = files.iter().map(|file| {
            let parts = there(paths.incomplete(&file.etag)).max(there(paths.blob(&file.etag)));
            file.size.unwrap_or(0).saturating_sub(parts)
        });
        let needed: u64 = needed.fold(0, u64::saturating_add);
        // The folder may not exist yet: the disk is that of the first one above it that does.
        let disk = self.config.cache.ancestors().find_map(|folder| statvfs(folder).ok());
        let free = disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
        match free {
            Some(free) if free < needed => Err(Error::Invalid(format!(
                "{}: {} are to be downloaded, but the disk has room for {}",
                self.config.cache.display(),
                at_least(needed),
                at_most(free)
            ))),
            _ => Ok((needed, free)),
        }
    }

    /// All models that the cache has, by name.
    pub fn list(&self) -> Result<Vec<Cached>> {
        let mut out = Vec::new();
        for repo in snapshot::repos(&self.config.cache)? {
            let paths = self.paths(&repo);
            for (commit, files) in self.models(&repo)? {
                let files: Vec<&str> = files.iter().map(String::as_str).collect();
                out.push(snapshot::describe(&paths, &repo, &commit, &files));
            }
        }
        Ok(out)
    }

    /// The models of a repository's snapshots, each as the commit and its files. Of a model that
    /// several commits have, the newest.
    fn models(&self, repo: &RepoId) -> Result<Vec<(String, Vec<String>)>> {
        let paths = self.paths(repo);
        let mut out: Vec<(String, Vec<String>)> = Vec::new();
        for (commit, all) in self.snapshots(&paths)? {
            let names: Vec<&str> = all.iter().map(String::as_str).collect();
            for file in names.iter().filter(|name| name.ends_with(".gguf")) {
                let Choice::Files(files) = choose(&names, None, Some(file)) else { continue };
                let files: Vec<String> = files.into_iter().map(Into::into).collect();
                if !out.iter().any(|(_, known)| known[0] == files[0]) {
                    out.push((commit.clone(), files));
                }
            }
        }
        Ok(out)
    }

    /// Removes one model of a repository, or, where no type is named, the repository. Answers the
    /// bytes that became free.
    pub fn remove(&self, wanted: &Wanted) -> Result<u64> {
        let paths = self.paths(&wanted.repo);
        let absent =
            || Error::Invalid(format!("{wanted} is not in {}", self.config.cache.display()));
        if wanted.quant.is_none() && wanted.file.is_none() {
            let root = paths.root();
            if !root.is_dir() {
                return Err(absent());
            }
            let n_bytes = size_of(&root);
            fs::remove_dir_all(&root).map_err(|e| Error::io(&root, e))?;
            return Ok(n_bytes);
        }
        let mut doomed = Vec::new();
        let mut missed = None;
        for (commit, files) in self.snapshots(&paths)? {
            let names: Vec<&str> = files.iter().map(String::as_str).collect();
            match pick(&names, wanted, "the cache") {
                Ok(files) => doomed.extend(files.iter().map(|file| paths.pointer(&commit, file))),
                Err(e) => missed = missed.or(Some(e)),
            }
        }
        match (doomed.is_empty(), missed) {
            (true, Some(e)) => Err(e),
            (true, None) => Err(absent()),
            (false, _) => snapshot::remove(&paths, &doomed),
        }
    }
}

/// Bytes of the files in a folder, links aside.
fn size_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => size_of(&entry.path()),
        Ok(meta) if meta.is_file() => meta.len(),
        _ => 0,
    });
    sizes.sum()
}

/// The model's files, or a sentence about what there is instead.
fn pick<'a>(files: &[&'a str], wanted: &Wanted, place: &str) -> Result<Vec<&'a str>> {
    let list = |files: Vec<&str>| match files.is_empty() {
        true => "no GGUF file".to_owned(),
        false => files.join(", "),
    };
    let repo = &wanted.repo;
    Err(Error::Invalid(match choose(files, wanted.quant.as_deref(), wanted.file.as_deref()) {
        Choice::Files(files) => return Ok(files),
        Choice::NoSuchType(there) | Choice::NoSuchFile(there) => {
            format!("{wanted}: no such file; {place} has {}", list(there))
        }
        Choice::NoModel => format!(
            "{repo}: {place} has no GGUF file; a checkpoint's folder can be turned into one by \
             `moeba convert`"
        ),
        Choice::NoShard(name) => {
            format!("{repo}: {place} lacks {name}, a part of a split model")
        }
    }))
}
