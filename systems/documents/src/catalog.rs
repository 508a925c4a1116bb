//! Collections and their indexes: what is stored of them, and what commands use.
//!
//! Invariant: a [`Collection`] does not change; a change of its options or indexes puts a new one
//! into the [`Database`], under the lock of the database's row. Figures are shared by all of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use beeline_documents_query::error::{Code, QueryError, Result, bad, fail};
use beeline_documents_query::memory::Memory;
use beeline_documents_query::value::{integral, truthy};
use beeline_documents_query::violations::details;
use beeline_documents_query::{Filter, path};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};

use crate::layout::{kind, word};
use crate::versions::History;

/// Longest name of a database, bytes.
const DATABASE_NAME: usize = 63;
/// Longest name of a database and a collection with the dot between, bytes.
const NAMESPACE_NAME: usize = 255;
/// Most indexes of a collection, as MongoDB.
pub const MOST_INDEXES: usize = 64;

/// Checks the name of a database.
///
/// Errors: [`Code::InvalidNamespace`].
pub fn check_database_name(name: &str) -> Result<()> {
    let wrong = name.is_empty()
        || name.len() > DATABASE_NAME
        || name.contains(['/', '\\', '.', ' ', '"', '$', '\0']) && name != "$external";
    if wrong {
        fail(Code::InvalidNamespace, format!("Invalid database name: '{name}'"))
    } else {
        Ok(())
    }
}

/// Checks the name of a collection.
///
/// Errors: [`Code::InvalidNamespace`].
pub fn check_collection_name(database: &str, name: &str) -> Result<()> {
    let wrong = name.is_empty()
        || name.contains(['$', '\0'])
        || name.starts_with('.')
        || name.ends_with('.')
        || database.len() + 1 + name.len() > NAMESPACE_NAME;
    if wrong {
        return fail(
            Code::InvalidNamespace,
            format!("Invalid namespace specified '{database}.{name}'"),
        );
    }
    if name.starts_with("system.")
        && !matches!(name, "system.profile" | "system.users" | "system.js")
    {
        return fail(
            Code::InvalidNamespace,
            format!("Invalid system namespace: {database}.{name}"),
        );
    }
    Ok(())
}

/// How one field of an index is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From least to greatest.
    Up,
    /// From greatest to least.
    Down,
    /// By hash: equality only.
    Hashed,
}

/// An index.
#[derive(Clone, Debug)]
pub struct Index {
    /// Its number within the database.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Its paths.
    pub fields: Vec<(Vec<String>, Direction)>,
    /// No two documents have one key.
    pub unique: bool,
    /// Documents without any of the fields are left out.
    pub sparse: bool,
    /// Documents the filter does not select are left out.
    pub partial: Option<(Document, Filter)>,
    /// Documents end so many seconds after the date in the field.
    pub expires_s: Option<i64>,
    /// The planner does not see it.
    pub hidden: bool,
    /// Some document has an array there.
    pub multikey: bool,
    /// Built: the planner may use it. Writers keep it up from the start.
    pub ready: bool,
    /// The specification as it was given, with its name.
    pub given: Document,
    /// How often the planner chose it since the node started.
    pub uses: Arc<AtomicI64>,
}

impl Index {
    /// Parses a specification of `createIndexes`.
    ///
    /// Errors: kinds of index this server does not have, contradictory or unknown options.
    pub fn parse(given: &Document) -> Result<Self> {
        let key = match given.get("key") {
            Some(Bson::Document(key)) if !key.is_empty() => key,
            _ => return fail(Code::CannotCreateIndex, "Index keys cannot be empty."),
        };
        let mut fields = Vec::new();
        for (name, kind) in key {
            if name.starts_with('$') || name == "$**" || name.ends_with(".$**") {
                return fail(
                    Code::CannotCreateIndex,
                    format!(
                        "wildcard indexes and fields that begin with $ are not supported: {name}"
                    ),
                );
            }
            let direction = match kind {
                Bson::String(word) if word == "hashed" => Direction::Hashed,
                Bson::String(word)
                    if matches!(word.as_str(), "text" | "2d" | "2dsphere" | "geoHaystack") =>
                {
                    return fail(
                        Code::CannotCreateIndex,
                        format!(
                            "{word} indexes are not supported by this server: it has ascending, descending and hashed ones"
                        ),
                    );
                }
                Bson::String(word) => {
                    return fail(Code::CannotCreateIndex, format!("Unknown index plugin '{word}'"));
                }
                number => match beeline_documents_query::value::number(number) {
                    Some(number) if number > 0.0 => Direction::Up,
                    Some(number) if number < 0.0 => Direction::Down,
                    _ => {
                        return fail(
                            Code::CannotCreateIndex,
                            format!(
                                "Values in v:2 index key pattern cannot be of this type or zero: {key}"
                            ),
                        );
                    }
                },
            };
            fields.push((
                path::split(name)
                    .map_err(|error| QueryError::new(Code::CannotCreateIndex, error.message))?,
                direction,
            ));
        }
        if fields.len() > 32 {
            return fail(Code::CannotCreateIndex, "an index has at most 32 fields");
        }
        let flag = |name: &str| given.get(name).is_some_and(truthy);
        let name = match given.get("name") {
            Some(Bson::String(name)) if !name.is_empty() => name.clone(),
            None => default_name(key),
            Some(_) => return fail(Code::CannotCreateIndex, "an index needs a name"),
        };
        for option in given.keys() {
            if !matches!(
                option.as_str(),
                "key"
                    | "name"
                    | "unique"
                    | "sparse"
                    | "partialFilterExpression"
                    | "expireAfterSeconds"
                    | "hidden"
                    | "background"
                    | "v"
                    | "ns"
                    | "clustered"
                    | "comment"
                    | "prepareUnique"
            ) {
                if option == "collation" && is_simple_collation(given.get(option)) {
                    continue;
                }
                let known = matches!(
                    option.as_str(),
                    "collation"
                        | "storageEngine"
                        | "weights"
                        | "default_language"
                        | "wildcardProjection"
                        | "bits"
                        | "min"
                        | "max"
                        | "2dsphereIndexVersion"
                        | "textIndexVersion"
                        | "language_override"
                );
                let word = if known {
                    "is not supported by this server"
                } else {
                    "is not valid for an index specification"
                };
                return fail(
                    Code::InvalidIndexSpecificationOption,
                    format!("The field '{option}' {word}. Specification: {given}"),
                );
            }
        }
        let hashed = fields.iter().any(|(_, direction)| *direction == Direction::Hashed);
        if hashed && flag("unique") {
            return fail(
                Code::CannotCreateIndex,
                "Currently hashed indexes cannot guarantee uniqueness. Use a regular index.",
            );
        }
        let partial = match given.get("partialFilterExpression") {
            None => None,
            Some(Bson::Document(filter)) => Some((filter.clone(), Filter::parse(filter)?)),
            Some(_) => {
                return fail(Code::CannotCreateIndex, "partialFilterExpression must be an object");
            }
        };
        if partial.is_some() && flag("sparse") {
            return fail(
                Code::CannotCreateIndex,
                "cannot mix \"partialFilterExpression\" and \"sparse\" options",
            );
        }
        let expires_s = match given.get("expireAfterSeconds") {
            None => None,
            Some(value) => match integral(value) {
                Some(seconds @ 0..=2_147_483_647) if fields.len() == 1 => Some(seconds),
                Some(0..=2_147_483_647) => {
                    return fail(
                        Code::CannotCreateIndex,
                        "TTL indexes are single-field indexes, compound indexes do not support TTL",
                    );
                }
                _ => {
                    return fail(
                        Code::CannotCreateIndex,
                        "TTL index 'expireAfterSeconds' option must be within 0 and 2147483647",
                    );
                }
            },
        };
        if key.len() == 1
            && key.contains_key("_id")
            && (expires_s.is_some()
                || partial.is_some()
                || flag("sparse")
                || given.contains_key("hidden"))
        {
            return fail(Code::InvalidIndexSpecificationOption, "the _id index takes no options");
        }
        let mut given = given.clone();
        for dropped in ["ns", "background", "comment", "v"] {
            given.remove(dropped);
        }
        given.insert("name", name.clone());
        Ok(Self {
            id: 0,
            name,
            fields,
            unique: flag("unique"),
            sparse: flag("sparse"),
            partial,
            expires_s,
            hidden: flag("hidden"),
            multikey: false,
            ready: false,
            given,
            uses: Arc::default(),
        })
    }

    /// Its key document.
    #[must_use]
    pub fn key(&self) -> Document {
        self.given.get_document("key").cloned().unwrap_or_default()
    }

    fn stored(&self) -> Document {
        doc! { "id": i64::from(self.id), "multikey": self.multikey, "ready": self.ready, "given": self.given.clone() }
    }

    fn load(stored: &Document) -> Result<Self> {
        let given = stored.get_document("given").map_err(|_| damaged("an index"))?;
        Ok(Self {
            id: stored
                .get("id")
                .and_then(integral)
                .and_then(|id| u32::try_from(id).ok())
                .ok_or_else(|| damaged("an index"))?,
            multikey: stored.get_bool("multikey").unwrap_or(true),
            ready: stored.get_bool("ready").unwrap_or(false),
            ..Self::parse(given)?
        })
    }

    /// As `listIndexes` shows it.
    #[must_use]
    pub fn shown(&self) -> Document {
        let mut shown = doc! { "v": 2, "key": self.key(), "name": self.name.clone() };
        for (name, value) in &self.given {
            if !matches!(name.as_str(), "key" | "name") {
                shown.insert(name.clone(), value.clone());
            }
        }
        shown
    }
}

/// True for a collation that compares bytes, which is what this server does.
#[must_use]
pub fn is_simple_collation(collation: Option<&Bson>) -> bool {
    match collation {
        None => true,
        Some(Bson::Document(given)) => {
            given.is_empty() || given.get_str("locale").is_ok_and(|locale| locale == "simple")
        }
        Some(_) => false,
    }
}

/// The name drivers give an index: its fields and directions.
#[must_use]
pub fn default_name(key: &Document) -> String {
    let parts: Vec<String> = key
        .iter()
        .map(|(name, kind)| match kind {
            Bson::String(word) => format!("{name}_{word}"),
            number => format!("{name}_{}", integral(number).unwrap_or(1)),
        })
        .collect();
    parts.join("_")
}

fn damaged(what: &str) -> QueryError {
    QueryError::new(Code::InternalError, format!("the stored description of {what} cannot be read"))
}

/// What happens to a document that a validator refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validation {
    /// Nothing.
    Off,
    /// The node's log tells it.
    Warn,
    /// The write fails.
    Refuse,
}

/// Figures of a collection, kept as it changes.
#[derive(Debug, Default)]
pub struct Figures {
    /// The other two are right; they are counted when somebody first asks.
    pub counted: AtomicBool,
    /// Documents.
    pub documents: AtomicI64,
    /// Their bytes.
    pub bytes: AtomicI64,
    /// The number the next insertion into a capped collection gets; 0: not known.
    pub next_record: AtomicI64,
}

impl Figures {
    /// So many documents and bytes more.
    pub fn add(&self, documents: i64, bytes: i64) {
        self.documents.fetch_add(documents, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// A collection.
#[derive(Clone, Debug)]
pub struct Collection {
    /// `database.name`.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its number within the database.
    pub id: u32,
    /// What other parts of a cluster know it by.
    pub uuid: [u8; 16],
    /// Its options as they were given.
    pub options: Document,
    /// What a document must satisfy.
    pub validator: Option<Filter>,
    /// What happens if it does not.
    pub validation: Validation,
    /// `moderate`: documents that did not satisfy it before may stay so.
    pub moderate: bool,
    /// Most bytes and most documents of a capped collection.
    pub capped: Option<(u64, Option<u64>)>,
    /// Its indexes beside `_id`.
    pub indexes: Vec<Arc<Index>>,
    /// Its figures.
    pub figures: Arc<Figures>,
}

impl Collection {
    /// A new collection with checked options.
    ///
    /// Errors: options this server does not have.
    pub fn new(database: &str, name: &str, id: u32, options: &Document) -> Result<Self> {
        Self::with(database, name, id, rand::random(), options, Vec::new())
    }

    fn with(
        database: &str,
        name: &str,
        id: u32,
        uuid: [u8; 16],
        options: &Document,
        indexes: Vec<Arc<Index>>,
    ) -> Result<Self> {
        for (option, value) in options {
            let given = match option.as_str() {
                "timeseries" | "viewOn" | "pipeline" | "encryptedFields" => true,
                "collation" => !is_simple_collation(Some(value)),
                _ => false,
            };
            if given {
                return fail(
                    Code::CommandNotSupported,
                    format!("the option '{option}' of create is not supported by this server"),
                );
            }
        }
        let validator = match options.get("validator") {
            Some(Bson::Document(filter)) if !filter.is_empty() => Some(Filter::parse(filter)?),
            _ => None,
        };
        let level = options.get_str("validationLevel").unwrap_or("strict");
        let validation = match (level, options.get_str("validationAction").unwrap_or("error")) {
            ("off", _) => Validation::Off,
            ("strict" | "moderate", "error") => Validation::Refuse,
            ("strict" | "moderate", "warn") => Validation::Warn,
            (level, action) => {
                return bad(format!(
                    "validationLevel {level} with validationAction {action} is not known"
                ));
            }
        };
        let capped = if options.get("capped").is_some_and(truthy) {
            let size = options.get("size").and_then(beeline_documents_query::value::number);
            let Some(size) = size.filter(|size| *size >= 1.0) else {
                return fail(
                    Code::InvalidOptions,
                    "the 'size' field is required when 'capped' is true",
                );
            };
            let most =
                options.get("max").and_then(integral).and_then(|most| u64::try_from(most).ok());
            Some(((size as u64).max(4096), most.filter(|most| *most > 0)))
        } else {
            None
        };
        Ok(Self {
            namespace: format!("{database}.{name}"),
            name: name.to_owned(),
            id,
            uuid,
            options: options.clone(),
            validator,
            validation,
            moderate: level == "moderate",
            capped,
            indexes,
            figures: Arc::default(),
        })
    }

    /// The key of its catalog entry.
    #[must_use]
    pub fn catalog_key(&self) -> Vec<u8> {
        word(kind::CATALOG, self.name.as_bytes())
    }

    /// What is stored of it.
    ///
    /// Errors: options that cannot be written as BSON.
    pub fn stored(&self) -> Result<Vec<u8>> {
        let indexes: Vec<Document> = self.indexes.iter().map(|index| index.stored()).collect();
        let document = doc! {
            "id": i64::from(self.id),
            "uuid": self.uuid_value(),
            "options": self.options.clone(),
            "indexes": indexes,
        };
        document.to_vec().map_err(|error| QueryError::new(Code::InternalError, error.to_string()))
    }

    /// From what [`Collection::stored`] made.
    ///
    /// Errors: a description that cannot be read.
    pub fn load(database: &str, name: &str, bytes: &[u8]) -> Result<Self> {
        let broken = || damaged(&format!("the collection {database}.{name}"));
        let stored = Document::from_reader(bytes).map_err(|_| broken())?;
        let id = stored
            .get("id")
            .and_then(integral)
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(broken)?;
        let uuid = match stored.get("uuid") {
            Some(Bson::Binary(uuid)) => uuid.bytes.as_slice().try_into().map_err(|_| broken())?,
            _ => return Err(broken()),
        };
        let options = stored.get_document("options").map_err(|_| broken())?;
        let mut indexes = Vec::new();
        for index in stored.get_array("indexes").map_err(|_| broken())? {
            indexes.push(Arc::new(Index::load(index.as_document().ok_or_else(broken)?)?));
        }
        Self::with(database, name, id, uuid, options, indexes)
    }

    /// Its identity as BSON.
    #[must_use]
    pub fn uuid_value(&self) -> Bson {
        Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes: self.uuid.to_vec() })
    }

    /// The same with other indexes.
    #[must_use]
    pub fn with_indexes(&self, indexes: Vec<Arc<Index>>) -> Self {
        Self { indexes, ..self.clone() }
    }

    /// The index on `_id` as `listIndexes` shows it. Every collection lies in the order of `_id`; one
    /// that was asked to says so.
    #[must_use]
    pub fn id_index(&self) -> Document {
        match self.options.get("clusteredIndex") {
            Some(Bson::Document(given)) => {
                let name = given.get_str("name").unwrap_or("_id_");
                doc! { "v": 2, "key": { "_id": 1 }, "name": name, "unique": true, "clustered": true }
            }
            _ => doc! { "v": 2, "key": { "_id": 1 }, "name": "_id_" },
        }
    }

    /// Checks a document against the validator. `before` is what it was.
    ///
    /// Errors: [`Code::DocumentValidationFailure`].
    pub fn validate(&self, document: &Document, before: Option<&Document>) -> Result<()> {
        let Some(validator) = &self.validator else { return Ok(()) };
        if self.validation == Validation::Off || validator.matches(document) {
            return Ok(());
        }
        if self.moderate && before.is_some_and(|before| !validator.matches(before)) {
            return Ok(());
        }
        if self.validation == Validation::Warn {
            tracing::warn!(
                collection = self.namespace,
                "a document does not satisfy the validator"
            );
            return Ok(());
        }
        let id = document.get("_id").cloned().unwrap_or(Bson::Null);
        let given = self.options.get_document("validator");
        let details = given.map(|given| details(given, document)).unwrap_or_default();
        let info = doc! { "errInfo": { "failingDocumentId": id, "details": details } };
        fail(Code::DocumentValidationFailure, "Document failed validation")
            .map_err(|error| error.with(info))
    }
}

/// A database: the collections of one row.
#[derive(Debug)]
pub struct Database {
    /// Its name, which is its row.
    pub name: String,
    collections: RwLock<BTreeMap<String, Arc<Collection>>>,
    /// The number the next collection or index gets.
    pub next_id: AtomicU32,
    /// The entry in the system's row is there.
    pub announced: AtomicBool,
    /// Collections and indexes are made one at a time.
    pub changing: Mutex<()>,
    /// What open transactions see that is there no more.
    pub history: Mutex<History>,
}

impl Database {
    /// A database with these collections. What its transactions read of before counts as `memory`.
    #[must_use]
    pub fn new(
        name: &str,
        collections: Vec<Collection>,
        next_id: u32,
        announced: bool,
        memory: &Arc<Memory>,
    ) -> Self {
        let collections =
            collections.into_iter().map(|one| (one.name.clone(), Arc::new(one))).collect();
        Self {
            name: name.to_owned(),
            collections: RwLock::new(collections),
            next_id: AtomicU32::new(next_id),
            announced: AtomicBool::new(announced),
            changing: Mutex::default(),
            history: Mutex::new(History::counted(memory)),
        }
    }

    /// The row it lies in.
    #[must_use]
    pub fn row(&self) -> &[u8] {
        self.name.as_bytes()
    }

    /// A collection by name.
    #[must_use]
    pub fn collection(&self, name: &str) -> Option<Arc<Collection>> {
        self.collections.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All collections by name.
    #[must_use]
    pub fn collections(&self) -> Vec<Arc<Collection>> {
        self.collections.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Puts a collection in place of the one of its name.
    pub fn put(&self, collection: Collection) -> Arc<Collection> {
        let collection = Arc::new(collection);
        let mut all = self.collections.write().unwrap_or_else(PoisonError::into_inner);
        all.insert(collection.name.clone(), Arc::clone(&collection));
        collection
    }

    /// Takes a collection out.
    pub fn remove(&self, name: &str) -> Option<Arc<Collection>> {
        self.collections.write().unwrap_or_else(PoisonError::into_inner).remove(name)
    }

    /// A number no collection or index of the database has.
    pub fn take_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collection_is_stored_and_read_back() {
        let mut index =
            Index::parse(&doc! { "key": { "a.b": 1, "c": -1 }, "unique": true }).unwrap();
        index.id = 7;
        let made = Collection::new("d", "c", 3, &doc! { "validator": { "a": { "$gt": 1 } } })
            .unwrap()
            .with_indexes(vec![Arc::new(index)]);
        let read = Collection::load("d", "c", &made.stored().unwrap()).unwrap();
        assert_eq!((read.id, read.uuid, read.namespace.as_str()), (3, made.uuid, "d.c"));
        assert_eq!(read.indexes[0].name, "a.b_1_c_-1");
        assert!(read.indexes[0].unique && !read.indexes[0].ready);
        assert!(read.validate(&doc! { "a": 2 }, None).is_ok());
        assert_eq!(
            read.validate(&doc! { "a": 1 }, None).unwrap_err().code,
            Code::DocumentValidationFailure
        );
        assert!(Collection::load("d", "c", b"junk").is_err());
    }

    #[test]
    fn what_this_server_lacks_is_refused_by_name() {
        for given in [
            doc! { "key": { "a": "text" } },
            doc! { "key": { "a": "2dsphere" } },
            doc! { "key": {} },
            doc! { "key": { "a": 0 } },
            doc! { "key": { "a": "hashed" }, "unique": true },
            doc! { "key": { "a": 1 }, "nonsense": 1 },
            doc! { "key": { "a": 1, "b": 1 }, "expireAfterSeconds": 1 },
        ] {
            assert!(Index::parse(&given).is_err(), "{given}");
        }
        assert!(Collection::new("d", "c", 1, &doc! { "timeseries": {} }).is_err());
        assert!(check_database_name("a.b").is_err() && check_collection_name("d", "$x").is_err());
        assert!(check_collection_name("d", "x.y").is_ok());
    }
}
