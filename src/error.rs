//! One error type. Every variant prints as one sentence that names what was wrong, where, what was
//! expected and what was found. A broken invariant of our own is an `assert!`, never an `Error`.

use std::io;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: which file, and what it said.
    #[error("{}: {}", path.display(), sentence(source))]
    Io { path: PathBuf, source: io::Error },

    /// A file that is not what it should be. `field` is a key, a tensor name or a byte position.
    #[error("{}: {field}: expected {expected}, got {got}", path.display())]
    Format { path: PathBuf, field: String, expected: String, got: String },

    /// A flag, a request or a combination of them that cannot be served; a whole sentence.
    #[error("{0}")]
    Invalid(String),

    /// The command line does not make sense (exit code 2); a whole sentence.
    #[error("{0}")]
    Usage(String),

    /// Weights that a request needed could not be read; a whole sentence. The engine lives on.
    #[error("{0}")]
    Load(String),

    /// Too much is asked for at the moment; a whole sentence.
    #[error("{0}")]
    Busy(String),

    /// A GPU, or its driver, that is not there, has no room or failed; a whole sentence.
    #[error("{0}")]
    Device(String),

    /// The user pressed Ctrl-C (exit code 130).
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    pub fn io(path: impl AsRef<Path>, source: io::Error) -> Self {
        Error::Io { path: path.as_ref().to_owned(), source }
    }

    pub fn format(
        path: impl AsRef<Path>,
        field: impl Into<String>,
        expected: impl Into<String>,
        got: impl Into<String>,
    ) -> Self {
        Error::Format {
            path: path.as_ref().to_owned(),
            field: field.into(),
            expected: expected.into(),
            got: got.into(),
        }
    }

    /// A copy of the error, for another request that failed with it.
    pub fn again(&self) -> Self {
        match self {
            Error::Io { path, source } => {
                Error::io(path, io::Error::new(source.kind(), source.to_string()))
            }
            other => Error::Load(other.to_string()),
        }
    }

    pub fn invalid(sentence: impl Into<String>) -> Self {
        Error::Invalid(sentence.into())
    }
}

/// The message of the system, without its number and the name of a temporary file.
pub fn sentence(e: &io::Error) -> String {
    let text = e.to_string();
    let text = text.split(" at path \"").next().unwrap_or_default();
    text.split(" (os error ").next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_file_that_was_asked_for_and_no_numbers() {
        let made = tempfile::Builder::new().prefix(".secret").tempfile_in("/nonexistent");
        let e = Error::io("/nonexistent/x", made.unwrap_err());
        assert_eq!(e.to_string(), "/nonexistent/x: No such file or directory");
        let e = Error::io("x", io::Error::from_raw_os_error(13));
        assert_eq!(e.to_string(), "x: Permission denied");
    }
}
