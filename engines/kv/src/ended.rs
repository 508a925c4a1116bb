//! What is known of rows and expiries that ended: their fields wait here until [`Shard::sweep_rows`] removes
//! them. What does not fit is found again by a sweep over all rows.
//!
//! [`Shard::sweep_rows`]: crate::shard::Shard::sweep_rows

use std::ops::Bound;

use crate::row_ends::RowEnds;
use crate::rows::REMEMBERED;

/// Ended rows whose fields are still there.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Namespace of the fields, and what their keys begin with.
    pub rows: Vec<(u32, Vec<u8>)>,
    /// Databases and keys of values that had an expiry beside them and were stored anew.
    pub expiries: Vec<(u32, Vec<u8>)>,
    /// Database and position of a sweep over all expiries, where more ended than are remembered.
    pub expiry_sweep: Option<(u32, u64)>,
    /// An expiry that could not be remembered ended since that sweep began: another one follows.
    pub expiries_again: bool,
    /// Where a sweep over all rows is; it begins with the opening.
    pub sweep: Option<(u32, Bound<Vec<u8>>)>,
    /// A row that could not be remembered ended behind that place: another sweep follows.
    pub again: bool,
    /// Databases and keys of rows that a crash left without a field.
    pub hollow: Vec<(u32, Vec<u8>)>,
    /// Rows of services that ended.
    pub marks: RowEnds,
    /// Keys of times of services' rows that mean nothing any more.
    pub times: Vec<Vec<u8>>,
}

/// Where a sweep begins.
pub(crate) const ALL_ROWS: Option<(u32, Bound<Vec<u8>>)> = Some((0, Bound::Unbounded));

impl Default for Ended {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            expiries: Vec::new(),
            expiry_sweep: None,
            expiries_again: false,
            sweep: ALL_ROWS,
            again: false,
            hollow: Vec::new(),
            marks: RowEnds::default(),
            times: Vec::new(),
        }
    }
}

impl Ended {
    /// True when no row is known to have ended, of a database or of a service.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.marks.is_empty()
    }

    /// True while fields of a database's rows wait to be removed.
    pub fn holds_fields(&self) -> bool {
        !self.rows.is_empty()
    }

    /// The value of a key that had an expiry beside it was stored anew, or is gone.
    pub fn remember_expiry(&mut self, database: u32, key: &[u8]) {
        if self.expiries.len() < REMEMBERED {
            self.expiries.push((database, key.to_vec()));
        } else if self.expiry_sweep.is_some() {
            self.expiries_again = true;
        } else {
            self.expiry_sweep = Some((0, 0));
        }
    }
}
