//! The library that a release build has inside, for `beeline run` where none lies beside the program: written out
//! on first use into a folder of this user's, under a name that tells what is in it.
//!
//! Versions lie beside each other. What stands there already is used only if it is, byte for byte, what this program
//! has inside; anything else is replaced. A folder that another user could write to, or could put another one in the
//! place of, is refused.

use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
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
    all.into_iter().flatten().filter(|folder| is_readable(folder)).collect()
}

fn is_readable(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|&byte| byte == b':' || byte.is_ascii_whitespace())
}

/// A name for these bytes; whether they stand there is looked at besides.
fn name(bytes: &[u8]) -> String {
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("libbeeline_sockets_preload-{sum:016x}.so")
}

/// Whether only `uid` and root decide what stands in `folder`, which exists, and under its name.
fn is_own(folder: &Path, uid: u32) -> std::io::Result<bool> {
    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    for above in folder.ancestors() {
        let about = std::fs::symlink_metadata(above)?;
        // Where each user removes only what is the user's own, the folder below stays what it is.
        let is_kept = above != folder && about.mode() & STICKY != 0;
        let is_closed = about.mode() & OTHERS_WRITE == 0 || is_kept;
        let is_ours = about.uid() == uid || (about.uid() == 0 && above != folder);
        if !about.is_dir() || !is_closed || !is_ours {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The folder by a name without links, made if it is not there.
fn own_folder(folder: &Path, uid: u32) -> anyhow::Result<PathBuf> {
    // Nothing is made in a folder that is another user's.
    let there = folder.ancestors().find(|above| above.exists()).context("nothing is there")?;
    let there = there.canonicalize()?;
    let about = std::fs::metadata(&there)?;
    let is_for_all = about.uid() == 0 && about.mode() & 0o1000 != 0;
    let is_root_s = about.uid() == 0 && about.mode() & 0o022 == 0;
    if !is_for_all && !is_root_s && !is_own(&there, uid)? {
        bail!("others may write there, or above it");
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let folder = folder.canonicalize()?;
    if !is_own(&folder, uid)? {
        bail!("others may write there, or above it");
    }
    if !is_readable(&folder) {
        bail!("the loader cannot read {}: it cuts names at colons and blanks", folder.display());
    }
    Ok(folder)
}

fn place(bytes: &[u8], folder: &Path) -> anyhow::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let folder = own_folder(folder, uid)?;
    let file = folder.join(name(bytes));
    let is_it = std::fs::symlink_metadata(&file)
        .is_ok_and(|about| about.is_file() && about.uid() == uid && about.mode() & 0o022 == 0)
        && std::fs::read(&file).is_ok_and(|found| found == bytes);
    if is_it {
        return Ok(file);
    }
    // Whole under its name or not at all: programs that have the old one go on with that. The name before is
    // random: process numbers come twice where containers share the folder.
    let permissions = std::fs::Permissions::from_mode(0o500);
    let mut fresh =
        tempfile::Builder::new().prefix(".").permissions(permissions).tempfile_in(&folder)?;
    fresh.write_all(bytes)?;
    fresh.persist(&file)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
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
    #[test]
    fn a_folder_below_one_that_others_write_to_or_have_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("between/own");
        place(b"one", &inside).unwrap();
        let between = folder.path().join("between");
        std::fs::set_permissions(&between, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(place(b"one", &inside).is_err());
        assert!(place(b"one", &between.join("another")).is_err());
        assert!(!between.join("another").exists(), "nothing is made there");
        // Where everybody may add, and remove only what is their own.
        std::fs::set_permissions(&between, std::fs::Permissions::from_mode(0o1777)).unwrap();
        place(b"one", &inside).unwrap();
        // Of another user, as the folders of a user are for root who has that user's HOME.
        let uid = rustix::process::geteuid().as_raw();
        assert!(own_folder(&inside, uid).is_ok());
        assert!(own_folder(&inside, uid + 1).is_err());
        assert!(own_folder(&inside.join("new"), uid + 1).is_err());
        if uid == 0 {
            let home = folder.path().join("home");
            std::fs::create_dir(&home).unwrap();
            std::os::unix::fs::chown(&home, Some(12_345), Some(12_345)).unwrap();
            assert!(place(b"one", &home.join("cache")).is_err());
            assert!(!home.join("cache").exists(), "nothing is made in another user's folder");
        }
    }

    #[test]
    fn writers_of_one_process_number_do_not_spoil_each_other_s_file() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("shared");
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|n| n as u8).collect();
        for round in 0..20_u8 {
            let bytes: Vec<u8> = bytes.iter().map(|byte| byte ^ round).collect();
            std::thread::scope(|scope| {
                let place = || std::fs::read(place(&bytes, &inside).unwrap()).unwrap() == bytes;
                let writers = [scope.spawn(place), scope.spawn(place), scope.spawn(place)];
                assert!(writers.into_iter().all(|writer| writer.join().unwrap()));
            });
        }
    }
}
