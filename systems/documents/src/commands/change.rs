//! One update or delete statement: a slice of documents is found and changed under one lock.
//!
//! Invariant: a statement goes on in the collection it began in; when that was dropped meanwhile, the
//! statement ends with an error and touches nothing of a collection that took its name.

use std::sync::Arc;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::sort::Order;
use beeline_documents_query::update::{ArrayFilters, Context as UpdateContext, Update};
use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use super::{Context, check_collation};
use crate::catalog::{Collection, Database};
use crate::engine::existing;
use crate::layout::{kind, numbered};
use crate::plan::choose;
use crate::scan::{Found, Scan, decode};
use crate::store::Backing;
use crate::write::{self, Rewrite, Witness, encode};

/// How often the first document of an order is looked for without a lock; then with it.
const LOOKS: usize = 8;

/// One update, parsed.
pub(super) struct Statement {
    pub filter: Filter,
    pub update: Update,
    pub array_filters: ArrayFilters,
    pub multi: bool,
    pub upsert: bool,
    pub hint: Option<Bson>,
    pub order: Option<Order>,
    pub variables: Document,
}

/// What became of it.
#[derive(Debug, Default)]
pub(super) struct Updated {
    pub matched: u64,
    pub modified: u64,
    pub upserted: Option<Bson>,
    pub before: Option<Document>,
    pub after: Option<Document>,
}

/// What a delete selects.
pub(super) struct Doomed<'d> {
    pub filter: &'d Filter,
    pub hint: Option<&'d Bson>,
    pub order: Option<&'d Order>,
    pub one_only: bool,
    pub variables: &'d Document,
}

pub(super) fn parse_update(source: &Document, variables: &Document) -> Result<Statement> {
    for name in source.keys() {
        if !matches!(
            name.as_str(),
            "q" | "u"
                | "c"
                | "multi"
                | "upsert"
                | "arrayFilters"
                | "hint"
                | "collation"
                | "comment"
        ) {
            return fail(
                Code::UnknownField,
                format!("BSON field 'update.updates.{name}' is an unknown field."),
            );
        }
    }
    check_collation(source.get("collation"))?;
    let Ok(query) = source.get_document("q") else {
        return fail(
            Code::NoSuchField,
            "BSON field 'update.updates.q' is missing but a required field",
        );
    };
    let Some(change) = source.get("u") else {
        return fail(
            Code::NoSuchField,
            "BSON field 'update.updates.u' is missing but a required field",
        );
    };
    let filters = match source.get("arrayFilters") {
        None => Vec::new(),
        Some(Bson::Array(all)) => all.clone(),
        Some(_) => return fail(Code::TypeMismatch, "arrayFilters must be an array"),
    };
    let mut variables = variables.clone();
    if let Ok(constants) = source.get_document("c") {
        variables.extend(constants.clone());
    }
    let array_filters = ArrayFilters::parse(&filters)?;
    let update = Update::parse(change, &array_filters)?;
    let multi = source.get("multi").is_some_and(beeline_documents_query::value::truthy);
    if multi && update.is_replacement() {
        return fail(
            Code::FailedToParse,
            "multi update is not supported for replacement-style update",
        );
    }
    let order = match source.get("sort") {
        Some(Bson::Document(_)) if multi => {
            return fail(Code::FailedToParse, "Cannot specify sort with multi=true");
        }
        Some(Bson::Document(order)) => Some(Order::parse(order)?),
        _ => None,
    };
    Ok(Statement {
        filter: Filter::parse(query)?,
        update,
        array_filters,
        multi,
        upsert: source.get("upsert").is_some_and(beeline_documents_query::value::truthy),
        hint: source.get("hint").cloned(),
        order,
        variables,
    })
}

/// Which documents a statement goes through.
struct Selected<'s> {
    filter: &'s Filter,
    hint: Option<&'s Bson>,
    order: Option<&'s Order>,
    /// At most so many are changed under one lock.
    most: usize,
    one_only: bool,
}

/// What is done to each.
type Changing<'c> = dyn FnMut(&mut dyn Backing, &Arc<Collection>, &Found) -> Result<()> + 'c;

/// Calls `change` with every document that is selected, under the lock of the row.
fn each(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    selected: &Selected<'_>,
    scope: &Scope<'_>,
    change: &mut Changing<'_>,
) -> Result<()> {
    let Some(collection) = context.collection(Some(database), name)? else { return Ok(()) };
    let fresh = |collection: &Collection| -> Result<(Scan, bool)> {
        let plan = choose(collection, selected.filter, selected.order, selected.hint)?;
        let sorted = plan.sorted;
        Ok((Scan::new(collection, plan, selected.filter.clone()), sorted))
    };
    let (mut scan, sorted) = fresh(&collection)?;
    if !sorted && let Some(order) = selected.order {
        for look in 0.. {
            // The walk lets others in between its slices; what it found is looked at again.
            let mut best = None;
            while look < LOOKS && !scan.done {
                context.within(database, |row| {
                    scan.check(row, database.collection(name).as_deref())?;
                    first_of(row, &mut scan, order, scope, &mut best)
                })?;
            }
            let done = context.within(database, |row| {
                let Some(collection) = database.collection(name) else {
                    return row.miss(name).map(|()| true);
                };
                scan.check(row, Some(&collection))?;
                while !scan.done {
                    first_of(row, &mut scan, order, scope, &mut best)?;
                }
                let Some((_, found)) = &best else { return Ok(true) };
                let (place, mut bytes) =
                    (numbered(kind::RECORD, collection.id, &found.record), Vec::new());
                let same = row.get(&place, &mut bytes)? && bytes == found.bytes;
                if same {
                    change(row, &collection, found)?;
                }
                Ok(same)
            })?;
            if done {
                return Ok(());
            }
            scan = fresh(&*existing(database, name)?)?.0;
        }
    }
    let mut changed = 0;
    loop {
        let done = context.within(database, |row| {
            scan.check(row, database.collection(name).as_deref())?;
            let mut found = Vec::new();
            scan.slice(row, scope, selected.most, &mut found)?;
            for one in &found {
                // An index may have grown an array meanwhile.
                change(row, &existing(database, name)?, one)?;
                changed += 1;
            }
            Ok(scan.done || selected.one_only && changed > 0)
        })?;
        if done {
            return Ok(());
        }
    }
}

/// Looks at one slice for the first document in an order that no index has.
fn first_of(
    row: &mut dyn Backing,
    scan: &mut Scan,
    order: &Order,
    scope: &Scope<'_>,
    best: &mut Option<(Vec<Bson>, Found)>,
) -> Result<()> {
    let mut found = Vec::new();
    scan.slice(row, scope, usize::MAX, &mut found)?;
    for one in found {
        let at = order.key(&decode(&one.bytes)?);
        if best.as_ref().is_none_or(|(known, _)| order.compare_keys(&at, known).is_lt()) {
            *best = Some((at, one));
        }
    }
    Ok(())
}

/// Runs one update.
pub(super) fn run_update(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    statement: &Statement,
    witness: &mut dyn Witness,
) -> Result<Updated> {
    let mut updated = Updated::default();
    let scope = Scope::with_variables(&statement.variables);
    let update_context = UpdateContext {
        filter: &statement.filter,
        array_filters: &statement.array_filters,
        inserting: false,
        scope: &scope,
    };
    let selected = Selected {
        filter: &statement.filter,
        hint: statement.hint.as_ref(),
        order: statement.order.as_ref(),
        most: if statement.multi { 128 } else { 1 },
        one_only: !statement.multi,
    };
    each(context, database, name, &selected, &scope, &mut |row, collection, found| {
        let before = decode(&found.bytes)?;
        let after = statement.update.apply(&before, &update_context)?;
        let replaced = statement.update.is_replacement();
        let rewrite = Rewrite { found, before: &before, after: &after, replaced };
        let changed = write::update(row, database, collection, &rewrite, witness)?;
        updated.matched += 1;
        updated.modified += u64::from(changed);
        if !statement.multi {
            (updated.before, updated.after) = (Some(before), Some(after));
        }
        Ok(())
    })?;
    if updated.matched == 0 && statement.upsert {
        upsert(context, database, name, statement, &update_context, &mut updated, witness)?;
    }
    context.engine.metrics.documents_updated.add_shared(updated.modified);
    Ok(updated)
}

fn upsert(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    statement: &Statement,
    update_context: &UpdateContext<'_>,
    updated: &mut Updated,
    witness: &mut dyn Witness,
) -> Result<()> {
    context.collection_or_new(database, name)?;
    let mut document = statement.update.insertion(update_context)?;
    if !document.contains_key("_id") {
        let mut with_id = doc! { "_id": ObjectId::new() };
        with_id.extend(document);
        document = with_id;
    }
    let (id, bytes) = write::prepare(encode(&document)?)?;
    context.within(database, |row| {
        let collection = existing(database, name)?;
        row.enter(&collection)?;
        write::insert(row, database, &collection, &id, bytes, witness)
    })?;
    context.engine.metrics.documents_inserted.add_shared(1);
    updated.upserted = Some(id);
    updated.after = Some(document);
    Ok(())
}

/// Deletes what a filter selects.
pub(super) fn run_delete(
    context: &Context<'_>,
    database: &Arc<Database>,
    name: &str,
    doomed: &Doomed<'_>,
    witness: &mut dyn Witness,
) -> Result<(u64, Option<Document>)> {
    let Doomed { filter, hint, order, one_only, variables } = *doomed;
    let scope = Scope::with_variables(variables);
    let (mut deleted, mut last) = (0, None);
    let most = if one_only { 1 } else { 256 };
    let selected = Selected { filter, hint, order, most, one_only };
    each(context, database, name, &selected, &scope, &mut |row, collection, found| {
        write::delete(row, collection, found, witness)?;
        deleted += 1;
        if one_only {
            last = Some(decode(&found.bytes)?);
        }
        Ok(())
    })?;
    context.engine.metrics.documents_deleted.add_shared(deleted);
    Ok((deleted, last))
}
