//! The two questions to the hub before a download: which commit, and which files it has.

use super::http::Http;
use super::listing::{self, RemoteFile};
use super::paths::BRANCH;
use super::retry::{Tries, Try};
use super::{Patience, RepoId};
use crate::Error;

/// The most pages of a listing: no model is picked from a repository with more files.
const MAX_PAGES: usize = 100;

pub struct Api<'a> {
    pub http: &'a Http<'a>,
    pub endpoint: &'a str,
    pub patience: Patience,
}

impl Api<'_> {
    /// The commit that the branch is at.
    pub fn commit(&self, repo: &RepoId) -> Try<String> {
        let url = format!("{}/api/models/{repo}/revision/{BRANCH}", self.endpoint);
        let (body, _) = self.json(&url, repo)?;
        listing::commit(&body).map_err(|why| Error::Invalid(format!("{url}: {why}")).into())
    }

    /// All files of a commit.
    pub fn listing(&self, repo: &RepoId, commit: &str) -> Try<Vec<RemoteFile>> {
        let mut url = format!("{}/api/models/{repo}/tree/{commit}?recursive=true", self.endpoint);
        let mut out = Vec::new();
        for _ in 0..MAX_PAGES {
            let (body, next) = self.json(&url, repo)?;
            let page =
                listing::files(&body).map_err(|why| Error::Invalid(format!("{url}: {why}")))?;
            out.extend(page);
            match next {
                Some(next) => url = next,
                None => return Ok(out),
            }
        }
        Err(Error::Invalid(format!("{repo}: its list of files does not end")).into())
    }

    fn json(&self, url: &str, repo: &RepoId) -> Try<(Vec<u8>, Option<String>)> {
        let mut tries = Tries::new(&self.patience);
        loop {
            match self.http.json(url, repo) {
                Err(failure) => tries.again(failure)?,
                found => return found,
            }
        }
    }
}
