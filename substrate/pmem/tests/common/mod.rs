//! What the suites share.

use beeline_pmem::PoolKind;

/// The kind of pool that suites about files make: `dax` where the variable `BEELINE_POOL_KIND` says
/// so, which then needs temporary folders on a DAX file system. The lab runs the suites that way.
pub fn file_kind() -> PoolKind {
    match std::env::var("BEELINE_POOL_KIND").as_deref() {
        Ok("dax") => PoolKind::Dax,
        Ok("file") | Err(_) => PoolKind::File,
        Ok(other) => panic!("BEELINE_POOL_KIND is dax or file, not {other}"),
    }
}
