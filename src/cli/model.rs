//! The model that a subcommand works on: a file, or one of a hub that becomes a file; and the
//! metadata that is to stand in its place.

use super::hub::{Consent, HUB_PREFIX, HubArgs};
use super::values::Parsed;
use super::{bundled, figures};
use crate::engine::plan::ram::RamBudget;
use crate::engine::{Engine, EngineOptions, Loading};
use crate::gguf::{Gguf, Override};
use crate::hub::{self, Wanted};
use crate::{Error, Result, terminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args, Debug)]
pub struct ModelArg {
    /// GGUF file (or -m FILE), a split model's first one, hf:USER/REPO[:QUANT], or demo
    #[arg(value_name = "MODEL", env = "MOEBA_MODEL", required_unless_present = "hf_repo")]
    model: Option<PathBuf>,
    // By the time that clap looks, the flag has become a MODEL (see `argv`): this is its place in
    // the help, and what the environment says if it names no MODEL.
    /// Model from Hugging Face instead of MODEL (or -hf); without QUANT Q4_K_M if there is one
    #[arg(long, value_name = "USER/REPO[:QUANT]", env = "MOEBA_HF_REPO", help_heading = "Model")]
    hf_repo: Option<String>,
    #[command(flatten)]
    hub: HubArgs,
    /// Replace metadata of the file; TYPE is int, float, bool or str; may be repeated
    #[arg(long, value_name = "KEY=TYPE:VALUE,…", value_parser = overrides)]
    #[arg(help_heading = "Model")]
    override_kv: Vec<Overrides>,
}

/// A list is one value of the flag, so it needs a type of its own: clap reads `Vec` as "repeated".
#[derive(Clone, Debug)]
struct Overrides(Vec<Override>);

fn overrides(text: &str) -> Parsed<Overrides> {
    let items = csv_row(text);
    items.iter().map(|item| item.parse()).collect::<Parsed<_>>().map(Overrides)
}

/// The fields of a line of CSV (RFC 4180): one that begins with a quote may have commas, and two
/// quotes for one.
pub(super) fn csv_row(text: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let field = fields.last_mut().expect("there is always one");
        match c {
            '"' if quoted && chars.next_if_eq(&'"').is_some() => field.push('"'),
            '"' if quoted => quoted = false,
            '"' if field.is_empty() => quoted = true,
            ',' if !quoted => fields.push(String::new()),
            c => field.push(c),
        }
    }
    fields
}

/// A model on this machine, and what is to be read in it.
#[derive(Clone, Debug)]
pub struct Model {
    pub path: PathBuf,
    overrides: Vec<Override>,
}

impl ModelArg {
    /// The model's file; one of a hub is downloaded unless the cache has it.
    pub fn resolve(&self) -> Result<Model> {
        self.resolve_with_consent(&mut |_, _| Ok(true))
    }

    /// [`ModelArg::resolve`] that asks before it downloads.
    pub fn resolve_with_consent(&self, consent: Consent<'_>) -> Result<Model> {
        let overrides = self.overrides();
        let wanted = match (&self.model, &self.hf_repo) {
            (Some(path), _) => path.to_str().and_then(|text| {
                text.strip_prefix(HUB_PREFIX).or(hub::is_address(text).then_some(text))
            }),
            (None, repo) => repo.as_deref(),
        };
        let path = match (wanted, &self.model) {
            (Some(wanted), _) => self.hub.fetch_with_consent(wanted, consent)?,
            (None, Some(path)) => {
                let bundled = bundled::resolve(path)?;
                if bundled.is_none() {
                    check_exists(path)?;
                }
                self.hub.warn_of_a_file();
                bundled.unwrap_or_else(|| path.clone())
            }
            // clap has seen to one of them.
            (None, None) => return Err(Error::Usage("a model must be given".into())),
        };
        Ok(Model { path, overrides })
    }

    /// Whether a model is named.
    pub fn is_given(&self) -> bool {
        self.model.is_some() || self.hf_repo.is_some()
    }

    /// The model in this file, which is there.
    pub fn at(&self, path: &Path) -> Model {
        Model { path: path.to_owned(), overrides: self.overrides() }
    }

    /// The flags of hubs.
    pub fn hub(&self) -> &HubArgs {
        &self.hub
    }

    /// The arguments that name the same model on another machine.
    pub fn arguments(&self) -> Vec<String> {
        let path = self.model.as_ref().map(|path| path.display().to_string());
        let repo = self.hf_repo.iter().flat_map(|repo| ["--hf-repo".to_owned(), repo.clone()]);
        path.into_iter().chain(repo).collect()
    }

    /// Metadata that replaces the file's own.
    pub fn overrides(&self) -> Vec<Override> {
        self.override_kv.iter().flat_map(|list| list.0.clone()).collect()
    }

    /// Opens the file for its metadata.
    pub fn open(&self) -> Result<Gguf> {
        self.resolve()?.open()
    }
}

/// A repository's name where a file's is expected gets an answer of its own, and so does a name of
/// another program's library.
fn check_exists(path: &Path) -> Result<()> {
    let text = path.to_str().unwrap_or_default();
    let is_repo = !text.ends_with(".gguf") && Wanted::parse(text).is_ok();
    let folder_exists = path.parent().is_some_and(Path::exists);
    if is_repo && !folder_exists {
        let sentence =
            format!("{text}: no such file; if it is a Hugging Face repository, use -hf {text}");
        return Err(Error::invalid(sentence));
    }
    let is_tag = !text.contains(['/', '\\']) && text.contains(':');
    if is_tag && !path.exists() {
        let sentence = format!(
            "{text}: no such file; models have Hugging Face's names here, as in `moeba run -hf \
             unsloth/Qwen3-30B-A3B-GGUF`: see `moeba pull --help`"
        );
        return Err(Error::invalid(sentence));
    }
    Ok(())
}

impl Model {
    pub fn open(&self) -> Result<Gguf> {
        Gguf::open_with(&self.path, &self.overrides)
    }

    /// The options, with the overrides of this model.
    pub fn options(&self, options: &EngineOptions) -> EngineOptions {
        EngineOptions { overrides: self.overrides.clone(), ..options.clone() }
    }

    /// Loads it with a bar, then says what was loaded.
    pub fn load(&self, options: &EngineOptions) -> Result<Arc<Engine>> {
        self.load_with(options, &mut |_| ())
    }

    /// [`Model::load`] that also tells how far it is.
    pub fn load_with(
        &self,
        options: &EngineOptions,
        progress: &mut dyn FnMut(Loading),
    ) -> Result<Arc<Engine>> {
        let start = Instant::now();
        let bar = terminal::bar("loading", 1000);
        let engine = Engine::load(&self.path, &self.options(options), &mut |now| {
            bar.set_message(&format!("loading: {}", now.phase));
            bar.set_position(now.thousandths());
            progress(now);
        })?;
        drop(bar);
        if options.ram != RamBudget::Auto && engine.plan().sizes.expert_bytes == 0 {
            log::warn!("--ram has no effect: the model has no experts to read from disk");
        }
        let told = format!("{}; loaded in {}", engine.describe(), figures::time(start.elapsed()));
        told.lines().for_each(|line| log::info!("{line}"));
        Ok(engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_overrides_are_lines_of_csv() {
        let cases: &[(&str, &[&str])] = &[
            ("a=int:1", &["a=int:1"]),
            ("a=int:1,b=str:x y", &["a=int:1", "b=str:x y"]),
            (r#""a=str:x,y",b=bool:true"#, &["a=str:x,y", "b=bool:true"]),
            (r#""a=str:say ""hi""",b=str:"q""#, &[r#"a=str:say "hi""#, r#"b=str:"q""#]),
            ("a,,b", &["a", "", "b"]),
        ];
        for (text, fields) in cases {
            assert_eq!(csv_row(text), *fields, "{text}");
        }
        let Overrides(list) = overrides("a=int:1,b=bool:true").unwrap();
        assert_eq!(list.iter().map(Override::key).collect::<Vec<_>>(), ["a", "b"]);
        for bad in ["", "a=int:1,", "a=int:1,b=int:x"] {
            assert!(overrides(bad).is_err(), "{bad:?}");
        }
    }
}
