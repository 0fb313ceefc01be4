//! The bundled model, which the name `demo` stands for: installations have it beside the program,
//! clones in models/demo.

use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// The name where a file's could stand.
pub const NAME: &str = "demo";

const FILE: &str = "moeba-demo.gguf";

/// PREFIX/share/moeba of the PREFIX/bin that the program is in, then that of a clone.
fn places() -> Vec<PathBuf> {
    let program = std::env::current_exe().ok();
    let prefix = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let installed = prefix.map(|prefix| prefix.join("share/moeba").join(FILE));
    let clone = Path::new("models/demo").join(FILE);
    installed.into_iter().chain([clone]).collect()
}

/// The model's file, if this machine has it.
pub fn find() -> Option<PathBuf> {
    places().into_iter().find(|path| path.is_file())
}

/// The file that the name stands for; `None` if this is another name, or a file of this name is
/// there.
pub fn resolve(path: &Path) -> Result<Option<PathBuf>> {
    if path.as_os_str() != NAME || path.exists() {
        return Ok(None);
    }
    find().map(Some).ok_or_else(|| {
        let places: Vec<String> = places().iter().map(|path| path.display().to_string()).collect();
        Error::invalid(format!(
            "{NAME}: no such file, and the bundled model is not at {}",
            places.join(" or ")
        ))
    })
}
