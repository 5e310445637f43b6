//! The few file operations a deployment needs: private files and copies of whole directories. No
//! knowledge of what is in them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::TestbedError;

/// Writes a file that only its owner may read, as mongod demands of keys.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<(), TestbedError> {
    fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|e| TestbedError::path("write", path, e))
}

/// Copies everything below `from` into `to`, which is emptied first.
pub(crate) fn replace_directory(from: &Path, to: &Path) -> Result<(), TestbedError> {
    if to.exists() {
        fs::remove_dir_all(to).map_err(|e| TestbedError::path("empty", to, e))?;
    }
    copy_directory(from, to)
}

fn copy_directory(from: &Path, to: &Path) -> Result<(), TestbedError> {
    fs::create_dir_all(to).map_err(|e| TestbedError::path("create", to, e))?;
    for entry in fs::read_dir(from).map_err(|e| TestbedError::path("read", from, e))? {
        let entry = entry.map_err(|e| TestbedError::path("read", from, e))?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        let kind = entry.file_type().map_err(|e| TestbedError::path("look at", &source, e))?;
        if kind.is_dir() {
            copy_directory(&source, &target)?;
        } else {
            fs::copy(&source, &target).map_err(|e| TestbedError::path("copy", &source, e))?;
        }
    }
    Ok(())
}

/// The last `lines` lines of a file, or why there are none. Reads no more than its last 64 KB.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    use std::io::{Read, Seek, SeekFrom};
    const READ_BYTES: u64 = 64 * 1024;
    let read = || -> std::io::Result<String> {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(READ_BYTES)))?;
        let mut bytes = Vec::new();
        file.take(READ_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => {
            let all: Vec<&str> = text.lines().collect();
            all.iter().skip(all.len().saturating_sub(lines)).copied().collect::<Vec<_>>().join("\n")
        }
        Err(error) => format!("({} cannot be read: {error})", path.display()),
    }
}
