//! Models of a hub: the flags that say which file and how, and `moeba pull`, `list` and `rm`.

use super::out;
use super::values::{self, Parsed};
use crate::hub::{Ahead, Config, Hub, Step, Token, Wanted};
use crate::terminal::{self, Bar};
use crate::units::size;
use crate::{Error, Result};
use std::path::PathBuf;

/// Whether a model of this name may be downloaded.
pub type Consent<'a> = &'a mut dyn FnMut(&str, &Ahead) -> Result<bool>;

/// Before the name of a repository where a file's could stand.
pub const HUB_PREFIX: &str = "hf:";

// Each flag names its heading: one for all would be that of the flags behind them, too.
#[derive(clap::Args, Debug)]
pub struct HubArgs {
    /// Name of a file in the repository (or -hff)
    #[arg(long, value_name = "FILE", env = "MOEBA_HF_FILE", help_heading = "Model")]
    hf_file: Option<String>,
    /// Token for private repositories (or -hft); HF_TOKEN is safer, as other users cannot see it
    #[arg(long, value_name = "TOKEN", value_parser = secret, help_heading = "Model")]
    hf_token: Option<Secret>,
    /// Use only files that are already downloaded
    #[arg(long, env = "MOEBA_OFFLINE", value_parser = values::boolean)]
    #[arg(help_heading = "Model")]
    offline: bool,
}

/// A token that is judged later: clap would repeat a wrong one in its message.
#[derive(Clone)]
struct Secret(String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

fn secret(text: &str) -> Parsed<Secret> {
    Ok(Secret(text.into()))
}

/// `USER/REPO[:QUANT]`, with or without what marks it as a hub's.
pub fn wanted(text: &str) -> Result<Wanted> {
    Wanted::parse(text.strip_prefix(HUB_PREFIX).unwrap_or(text)).map_err(Error::Usage)
}

impl HubArgs {
    pub fn hub(&self) -> Result<Hub> {
        let mut config = Config::from_env()?;
        if let Some(Secret(token)) = &self.hf_token {
            config.token = Some(Token::new(token)?);
        }
        config.offline |= self.offline;
        Ok(Hub::new(config))
    }

    /// Flags that only a repository heeds and that are given all the same.
    pub fn warn_of_a_file(&self) {
        if let Some(name) = &self.hf_file {
            log::warn!("--hf-file {name} has no effect: MODEL is a file, not a repository");
        }
    }

    /// The model's first file on this machine.
    pub fn fetch(&self, text: &str) -> Result<PathBuf> {
        self.fetch_with_consent(text, &mut |_, _| Ok(true))
    }

    /// [`HubArgs::fetch`] that asks before it downloads, with the model's name.
    pub fn fetch_with_consent(&self, text: &str, consent: Consent<'_>) -> Result<PathBuf> {
        let mut wanted = wanted(text)?;
        if let Some(file) = &self.hf_file {
            wanted = wanted.with_file(file).map_err(Error::Usage)?;
        }
        let mut bar: Option<Bar> = None;
        let mut progress = |step: Step<'_>| {
            let bar = bar.get_or_insert_with(|| {
                out::note(&format!("downloading {wanted}, {}", size(step.total)));
                terminal::bytes("", step.total, step.done)
            });
            bar.set_message(step.file);
            bar.set_position(step.done);
            Ok(())
        };
        let mut consent = |ahead: &Ahead| consent(&wanted.to_string(), ahead);
        self.hub()?.fetch_with_consent(&wanted, &mut consent, &mut progress)
    }
}

#[derive(clap::Args, Debug)]
pub struct PullArgs {
    /// Hugging Face repository; without QUANT Q4_K_M, else Q8_0, else the first file
    #[arg(value_name = "USER/REPO[:QUANT]")]
    repo: String,
    #[command(flatten)]
    hub: HubArgs,
}

/// Prints where the file is.
pub fn pull(args: PullArgs) -> Result<()> {
    let path = args.hub.fetch(&args.repo)?;
    out::line(&path.display().to_string())
}

#[derive(clap::Args, Debug)]
pub struct ListArgs {}

pub fn list(_: ListArgs) -> Result<()> {
    let config = Config::from_env()?;
    let cache = config.cache.clone();
    let models = Hub::new(config).list()?;
    if models.is_empty() {
        out::note(&format!(
            "no models in {}; `moeba pull USER/REPO` downloads one",
            cache.display()
        ));
    }
    for model in models {
        let (name, size) = (model.name(), size(model.n_bytes));
        out::line(&format!("{name:<48} {size:>12}  {}", model.path.display()))?;
    }
    Ok(())
}

#[derive(clap::Args, Debug)]
pub struct RmArgs {
    /// Repository, or one of its models
    #[arg(value_name = "USER/REPO[:QUANT]")]
    repo: String,
}

pub fn rm(args: RmArgs) -> Result<()> {
    let wanted = wanted(&args.repo)?;
    let n_bytes = Hub::new(Config::from_env()?).remove(&wanted)?;
    out::note(&format!("removed {wanted}, freed {}", size(n_bytes)));
    Ok(())
}
