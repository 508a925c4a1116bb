//! The library that a release build has inside, for `beeline run` where none lies beside the program: written out
//! on first use into a folder of this user's, under a name that tells what is in it.
//!
//! Versions lie beside each other. What stands there already is used only if it is, byte for byte, what this program
//! has inside; anything else is replaced. A folder that another user could write to is refused.

use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

include!(concat!(env!("OUT_DIR"), "/preload.rs"));

/// Where it was written to; `None`: this build has none inside.
pub fn library() -> anyhow::Result<Option<PathBuf>> {
    let Some(bytes) = PRELOAD else { return Ok(None) };
    let mut outcome = Err(anyhow::anyhow!("no folder of this user's is known"));
    for folder in folders() {
        match place(bytes, &folder) {
            Ok(file) => return Ok(Some(file)),
            Err(error) => outcome = Err(error.context(folder.display().to_string())),
        }
    }
    outcome.context("writing the library that programs preload; name one with --library")
}

/// Folders of this user's whose name the loader can read: it cuts `LD_PRELOAD` at colons and blanks.
fn folders() -> Vec<PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let uid = rustix::process::geteuid().as_raw();
    let all = [
        cache.map(|cache| cache.join("beeline")),
        absolute("XDG_RUNTIME_DIR").map(|folder| folder.join("beeline")),
        Some(std::env::temp_dir().join(format!("beeline-{uid}"))),
    ];
    let is_readable = |path: &PathBuf| {
        !path.as_os_str().as_bytes().iter().any(|&byte| byte == b':' || byte.is_ascii_whitespace())
    };
    all.into_iter().flatten().filter(is_readable).collect()
}

/// A name for these bytes; whether they stand there is looked at besides.
fn name(bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("libbeeline_sockets_preload-{sum:016x}.so")
}

fn place(bytes: &[u8], folder: &Path) -> anyhow::Result<PathBuf> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let about = std::fs::symlink_metadata(folder)?;
    let uid = rustix::process::geteuid().as_raw();
    if !about.is_dir() || about.uid() != uid || about.mode() & 0o022 != 0 {
        bail!("others may write there");
    }
    let file = folder.join(name(bytes));
    let is_it = std::fs::symlink_metadata(&file)
        .is_ok_and(|about| about.is_file() && about.uid() == uid && about.mode() & 0o022 == 0)
        && std::fs::read(&file).is_ok_and(|found| found == bytes);
    if is_it {
        return Ok(file);
    }
    // Whole under its name or not at all: programs that have the old one go on with that.
    let fresh = folder.join(format!(".{}-{}", name(bytes), std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o500)
        .open(&fresh)
        .and_then(|mut out| out.write_all(bytes))
        .and_then(|()| std::fs::rename(&fresh, &file));
    if let Err(error) = written {
        let _ = std::fs::remove_file(&fresh);
        return Err(error.into());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn it_is_written_once_and_again_where_something_else_stands_there() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("of/this/user");
        let file = place(b"one", &inside).unwrap();
        let number = || std::fs::metadata(&file).unwrap().ino();
        let first = number();
        assert_eq!(place(b"one", &inside).unwrap(), file);
        assert_eq!(number(), first);
        // Another version lies beside it.
        assert_ne!(place(b"two", &inside).unwrap(), file);
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, b"eno").unwrap();
        assert_eq!(place(b"one", &inside).unwrap(), file);
        assert_eq!(std::fs::read(&file).unwrap(), b"one");
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/bin/true", &file).unwrap();
        place(b"one", &inside).unwrap();
        assert!(std::fs::symlink_metadata(&file).unwrap().is_file());
        assert_eq!(std::fs::read_dir(&inside).unwrap().count(), 2, "nothing else is left");
    }

    #[test]
    fn a_folder_that_others_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(place(b"one", folder.path()).is_err());
        let own = tempfile::tempdir().unwrap();
        let link = own.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        assert!(place(b"one", &link).is_err());
    }
}
