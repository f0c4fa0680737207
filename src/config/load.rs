//! Reads the config file, on rank 0 alone, and words what is wrong with it.

use std::path::Path;

use super::settings::FileLayer;
use super::{Config, Problem, Source, diagnose, read};
use crate::error::Error;

/// A config with its text, for errors that are found later.
pub struct Loaded {
    source: Source,
    config: Config,
}

/// `read_file` gives the bytes of a path.
///
/// # Errors
/// The file cannot be read, or every problem in it.
pub fn load(path: &Path, read_file: &dyn Fn(&Path) -> std::io::Result<Vec<u8>>) -> Result<Loaded, Error> {
    let name = path.display().to_string();
    let bytes = read_file(path).map_err(|err| {
        Error::rejected(format!("error: cannot read the config {name}: {err}\n  help: rank 0 reads it; the path is relative to the folder that rank 0 starts in"))
    })?;
    let source = Source::new(name, bytes).map_err(|text| Error::rejected(format!("error: {text}")))?;
    match read::parse(&source) {
        Ok(config) => Ok(Loaded { source, config }),
        Err(problems) => Err(Error::rejected(diagnose::render(&source, &problems))),
    }
}

impl Loaded {
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the file says about the settings.
    pub fn file(&self) -> &FileLayer {
        &self.config.file
    }

    /// The refusal of a config for problems that need the world to be seen.
    pub fn reject(&self, problems: &[Problem]) -> Error {
        Error::rejected(diagnose::render(&self.source, problems))
    }
}
