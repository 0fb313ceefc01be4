//! The cache's folders: which files of a repository they have, links to blobs, removal.

use super::RepoId;
use super::choice::type_of;
use super::download::is_whole;
use super::listing::RemoteFile;
use super::names;
use super::paths::{RepoPaths, link_target, repo_of_folder};
use crate::{Error, Result};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Folders in folders of a repository: as deep as anybody nests them.
const MAX_DEPTH: usize = 8;

/// A model that the cache has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    pub repo: RepoId,
    /// The type in `REPO:TYPE`, if the name has one.
    pub quant: Option<String>,
    /// The size of all its files.
    pub n_bytes: u64,
    /// Its first file.
    pub path: PathBuf,
}

impl Cached {
    /// `USER/REPO:TYPE`, by which it is found again.
    pub fn name(&self) -> String {
        let quant = self.quant.as_ref().map(|quant| format!(":{quant}")).unwrap_or_default();
        format!("{}{quant}", self.repo)
    }
}

/// The file as a snapshot has it, if it is there and whole.
pub fn find(paths: &RepoPaths, commit: &str, file: &RemoteFile) -> Option<PathBuf> {
    let pointer = paths.pointer(commit, &file.path);
    is_whole(&pointer, file.size).then_some(pointer)
}

/// Makes a snapshot name a blob. Where a file system has no links the blob itself moves there.
pub fn link(paths: &RepoPaths, commit: &str, file: &RemoteFile) -> Result<PathBuf> {
    let pointer = paths.pointer(commit, &file.path);
    let fail = |e: io::Error| Error::io(&pointer, e);
    if let Some(folder) = pointer.parent() {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    }
    // Under another name first: the link is there or not, and never broken.
    let mut new = pointer.clone().into_os_string();
    new.push(format!(".{}.new", std::process::id()));
    let made = symlink(&link_target(&file.path, &file.etag), Path::new(&new));
    match made {
        Ok(()) => fs::rename(&new, &pointer).map_err(fail)?,
        Err(e) => {
            log::debug!("{}: no link: {e}", pointer.display());
            fs::rename(paths.blob(&file.etag), &pointer).map_err(fail)?;
        }
    }
    Ok(pointer)
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Notes the commit that the branch is at.
pub fn set_branch(paths: &RepoPaths, commit: &str) -> Result<()> {
    let path = paths.branch();
    let fail = |e: io::Error| Error::io(&path, e);
    if fs::read_to_string(&path).is_ok_and(|old| old.trim() == commit) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(fail)?;
    let new = folder.join(format!(".main.{}.new", std::process::id()));
    fs::write(&new, commit).and_then(|()| fs::rename(&new, &path)).map_err(fail)
}

/// Commits that the cache has files of: the branch's, then the others, newest first.
pub fn commits(paths: &RepoPaths) -> Result<Vec<String>> {
    let branch = fs::read_to_string(paths.branch()).unwrap_or_default();
    let mut found: Vec<(bool, SystemTime, String)> = Vec::new();
    for (name, path) in entries(&paths.snapshots())? {
        if names::is_commit(&name) && path.is_dir() {
            let time = fs::metadata(&path).and_then(|meta| meta.modified());
            found.push((name == branch.trim(), time.unwrap_or(SystemTime::UNIX_EPOCH), name));
        }
    }
    found.sort_by(|a, b| b.cmp(a));
    Ok(found.into_iter().map(|(_, _, name)| name).collect())
}

/// Names of the files of a snapshot whose content is there, sorted.
pub fn files(paths: &RepoPaths, commit: &str) -> Result<Vec<String>> {
    let mut out = Vec::new();
    walk(&paths.snapshot(commit), "", MAX_DEPTH, &mut out)?;
    out.sort();
    Ok(out)
}

fn walk(folder: &Path, prefix: &str, depth: usize, out: &mut Vec<String>) -> Result<()> {
    for (name, path) in entries(folder)? {
        let name = format!("{prefix}{name}");
        if path.is_file() {
            out.push(name);
        } else if depth > 0 && path.is_dir() && !path.is_symlink() {
            walk(&path, &format!("{name}/"), depth - 1, out)?;
        }
    }
    Ok(())
}

/// A folder's entries; a folder that does not exist has none.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(folder, e)),
    };
    let mut out = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        // A name that is not UTF-8 was not put here by us.
        if let Ok(name) = entry.file_name().into_string() {
            out.push((name, entry.path()));
        }
    }
    Ok(out)
}

/// All repositories that the cache has.
pub fn repos(cache: &Path) -> Result<Vec<RepoId>> {
    let folders = entries(cache)?;
    let mut out: Vec<RepoId> =
        folders.iter().filter_map(|(name, _)| repo_of_folder(name)).collect();
    out.sort();
    Ok(out)
}

/// A model's entry in a listing; `files` are all of its files.
pub fn describe(paths: &RepoPaths, repo: &RepoId, commit: &str, files: &[&str]) -> Cached {
    let pointers: Vec<PathBuf> = files.iter().map(|file| paths.pointer(commit, file)).collect();
    let n_bytes = pointers.iter().filter_map(|p| Some(fs::metadata(p).ok()?.len())).sum();
    let path = pointers.first().cloned().unwrap_or_default();
    let quant = files.first().and_then(|file| type_of(file));
    Cached { repo: repo.clone(), quant, n_bytes, path }
}

/// Removes files from all snapshots, and the blobs that nothing else names. Answers the bytes that
/// became free.
pub fn remove(paths: &RepoPaths, doomed: &[PathBuf]) -> Result<u64> {
    let mut blobs = BTreeSet::new();
    let mut n_bytes = 0;
    for pointer in doomed {
        match fs::canonicalize(pointer) {
            Ok(blob) if pointer.is_symlink() => drop(blobs.insert(blob)),
            _ => n_bytes += fs::metadata(pointer).map_or(0, |meta| meta.len()),
        }
        fs::remove_file(pointer).map_err(|e| Error::io(pointer, e))?;
        // Folders that it leaves empty go with it; one that is not ends this.
        let folders = pointer.ancestors().skip(1).take_while(|f| *f != paths.snapshots());
        folders.map_while(|folder| fs::remove_dir(folder).ok()).for_each(drop);
    }
    let mut named = BTreeSet::new();
    for commit in commits(paths)? {
        for file in files(paths, &commit)? {
            named.extend(fs::canonicalize(paths.pointer(&commit, &file)));
        }
    }
    // Only what lies in this repository: a link may lead anywhere.
    let home = fs::canonicalize(paths.blobs()).unwrap_or_else(|_| paths.blobs());
    for blob in blobs.difference(&named).filter(|blob| blob.parent() == Some(&home)) {
        let len = fs::metadata(blob).map_or(0, |meta| meta.len());
        fs::remove_file(blob).map_err(|e| Error::io(blob, e))?;
        n_bytes += len;
    }
    Ok(n_bytes)
}
