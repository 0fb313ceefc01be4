//! The hub's address, the cache's folder, and the patience with servers.

use super::{paths, url};
use crate::{Error, Result};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The hub itself; HF_ENDPOINT names a mirror.
const ENDPOINT: &str = "https://huggingface.co";

/// The key to private repositories. It can be sent, but not printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The error does not quote the text.
    pub fn new(text: &str) -> Result<Token> {
        let text = text.trim();
        if text.is_empty() || !text.bytes().all(|b| b.is_ascii_graphic()) {
            let sentence = "the token for the hub must be printable ASCII without spaces";
            return Err(Error::Usage(sentence.into()));
        }
        Ok(Token(text.into()))
    }

    /// The value of an Authorization header.
    pub(super) fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Timeouts and numbers of retries.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Tries in a row that bring nothing.
    pub attempts: u32,
    /// Before the second try; each later one waits twice as long.
    pub first_delay: Duration,
    pub max_delay: Duration,
    pub connect: Duration,
    /// A connection on which nothing comes for so long is given up.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience {
            attempts: 5,
            first_delay: Duration::from_secs(1),
            max_delay: Duration::from_secs(30),
            connect: Duration::from_secs(15),
            stall: Duration::from_secs(30),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Config {
    /// Without a slash at the end.
    pub endpoint: String,
    /// The folder that has `models--…` in it.
    pub cache: PathBuf,
    pub token: Option<Token>,
    /// Send no requests: a file that is not in the cache is an error.
    pub offline: bool,
    pub patience: Patience,
}

impl Config {
    /// Reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and the variables of the cache's folder.
    pub fn from_env() -> Result<Config> {
        Config::from_vars(|name| std::env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Result<Config> {
        let text = |name: &str| -> Result<Option<String>> {
            let Some(value) = var(name).filter(|value| !value.is_empty()) else { return Ok(None) };
            let wrong = |_| Error::Usage(format!("{name} is not UTF-8"));
            value.into_string().map(Some).map_err(wrong)
        };
        let endpoint = text("HF_ENDPOINT")?.unwrap_or_else(|| ENDPOINT.into());
        if !url::is_http(&endpoint) {
            let sentence =
                format!("HF_ENDPOINT: expected a URL such as {ENDPOINT}, got {endpoint:?}");
            return Err(Error::Usage(sentence));
        }
        let cache = paths::cache_folder(&var).ok_or_else(|| {
            Error::invalid("no folder for downloaded models: set HF_HUB_CACHE or HOME")
        })?;
        let yes = ["1", "ON", "YES", "TRUE"];
        let offline = text("HF_HUB_OFFLINE")?;
        Ok(Config {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            token: text("HF_TOKEN")?.map(|token| Token::new(&token)).transpose()?,
            offline: offline.is_some_and(|v| yes.contains(&v.to_ascii_uppercase().as_str())),
            patience: Patience::default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(vars: &[(&str, &str)]) -> Result<Config> {
        Config::from_vars(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    }

    #[test]
    fn the_environment_is_heard() {
        let plain = config(&[("HOME", "/h")]).unwrap();
        assert_eq!(plain.endpoint, ENDPOINT);
        assert!(plain.token.is_none() && !plain.offline);
        let all = [
            ("HF_HUB_CACHE", "/c"),
            ("HF_ENDPOINT", "http://127.0.0.1:1/"),
            ("HF_TOKEN", " hf_secret\n"),
            ("HF_HUB_OFFLINE", "true"),
        ];
        let all = config(&all).unwrap();
        assert_eq!(all.endpoint, "http://127.0.0.1:1");
        assert_eq!(all.token.as_ref().unwrap().bearer(), "Bearer hf_secret");
        assert!(all.offline);
        assert!(!format!("{all:?}").contains("secret"));
        assert!(!config(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    }

    #[test]
    fn what_cannot_be_used_is_said_without_the_secret() {
        assert!(config(&[]).unwrap_err().to_string().contains("HF_HUB_CACHE"));
        let endpoint = config(&[("HOME", "/h"), ("HF_ENDPOINT", "ftp://x")]).unwrap_err();
        assert!(endpoint.to_string().contains("ftp://x"));
        let token = config(&[("HOME", "/h"), ("HF_TOKEN", "hf_secret\r\nX: y")]).unwrap_err();
        assert!(!token.to_string().contains("secret"), "{token}");
    }
}
