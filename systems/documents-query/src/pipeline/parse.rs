//! From stage documents to a [`Pipeline`].

use bson::{Bson, Document};

use super::group::{Buckets, Group};
use super::joins::{GraphLookup, Lookup, Unwind};
use super::{Accumulator, DEEPEST, Kept, Merge, Pipeline, Sink, Stage};
use crate::error::{Code, Result, bad, fail};
use crate::expression::Expression;
use crate::matching::Filter;
use crate::memory::Lease;
use crate::path;
use crate::projection::{Dialect, Projection};
use crate::sort::Order;
use crate::value::{compare, integral};

/// Stages that make documents instead of taking them; whoever runs the pipeline provides them.
const SOURCES: &[&str] = &[
    "$changeStream",
    "$documents",
    "$indexStats",
    "$collStats",
    "$currentOp",
    "$listSessions",
    "$listLocalSessions",
    "$planCacheStats",
];

/// Stages behind `$changeStream`: those that handle one event at a time.
const IN_CHANGE_STREAMS: &[&str] = &[
    "$addFields",
    "$match",
    "$project",
    "$redact",
    "$replaceRoot",
    "$replaceWith",
    "$set",
    "$unset",
];

/// `$unwind` stages of one pipeline at most: each takes its part of the stack.
const MOST_UNWINDS: usize = 100;

pub(super) fn pipeline(stages: &[Bson], depth: usize) -> Result<Pipeline> {
    if depth > DEEPEST {
        return fail(Code::Overflow, "pipelines are nested too deeply");
    }
    if stages.len() > 1000 {
        return fail(Code::InvalidLength, "Pipeline length must be no longer than 1000 stages");
    }
    let mut parsed = Vec::with_capacity(stages.len());
    for (at, source) in stages.iter().enumerate() {
        let Bson::Document(source) = source else {
            return fail(
                Code::TypeMismatch,
                "Each element of the 'pipeline' array must be an object",
            );
        };
        let (1, Some((name, argument))) = (source.len(), source.iter().next()) else {
            return fail(
                Code::StageShape,
                "A pipeline stage specification object must contain exactly one field.",
            );
        };
        let last = at + 1 == stages.len();
        if matches!(name.as_str(), "$out" | "$merge") && (!last || depth > 0) {
            return fail(
                Code::StageShape,
                format!("{name} can only be the final stage in the pipeline"),
            );
        }
        if SOURCES.contains(&name.as_str()) && at > 0 {
            return fail(
                Code::InvalidNamespace,
                format!("{name} is only valid as the first stage in a pipeline"),
            );
        }
        let watches =
            matches!(parsed.first(), Some(Stage::Source(first, _)) if first == "$changeStream");
        // First, for a stage that there is not has another code.
        stage(name, argument, depth, &mut parsed)?;
        if watches && !IN_CHANGE_STREAMS.contains(&name.as_str()) {
            return fail(
                Code::IllegalOperation,
                format!("{name} is not permitted in a $changeStream pipeline"),
            );
        }
    }
    if parsed.iter().filter(|stage| matches!(stage, Stage::Unwind(_))).count() > MOST_UNWINDS {
        return fail(
            Code::Overflow,
            format!("a pipeline has at most {MOST_UNWINDS} $unwind stages"),
        );
    }
    // A limit behind a sort bounds what the sort keeps.
    for at in 1..parsed.len() {
        if let (Stage::Sort(_, bound, _), [Stage::Limit(limit, _), ..]) = {
            let (before, after) = parsed.split_at_mut(at);
            (&mut before[at - 1], &*after)
        } {
            *bound = usize::try_from(*limit).ok();
        }
    }
    Ok(Pipeline { stages: parsed })
}

fn document<'a>(name: &str, value: &'a Bson) -> Result<&'a Document> {
    match value {
        Bson::Document(document) => Ok(document),
        _ => fail(Code::FailedToParse, format!("the {name} stage specification must be an object")),
    }
}

fn text<'a>(name: &str, given: &'a Document, field: &str) -> Result<&'a str> {
    match given.get(field) {
        Some(Bson::String(text)) => Ok(text),
        Some(_) => fail(Code::FailedToParse, format!("{name}: '{field}' must be a string")),
        None => fail(Code::FailedToParse, format!("{name}: missing '{field}'")),
    }
}

fn natural(name: &str, value: &Bson, least: i64) -> Result<u64> {
    match integral(value) {
        Some(number) if number >= least => Ok(number as u64),
        Some(_) if least == 1 => fail(Code::UnitNeeded, "the limit must be positive"),
        _ => fail(
            Code::FailedToParse,
            format!(
                "invalid argument to {name} stage: Expected a non-negative number in: {name}: {value}"
            ),
        ),
    }
}

fn field_path(name: &str, value: &str) -> Result<Vec<String>> {
    match value.strip_prefix('$') {
        Some(rest) => path::split(rest),
        None => fail(
            Code::UnwindShape,
            format!("path option to {name} stage should be prefixed with a '$': {value}"),
        ),
    }
}

fn accumulators(given: &Document, skip: &[&str]) -> Result<Vec<(String, Accumulator)>> {
    let mut fields = Vec::new();
    for (name, value) in given.iter().filter(|(name, _)| !skip.contains(&name.as_str())) {
        if name.contains('.') {
            return fail(Code::GroupField, format!("The field name '{name}' cannot contain '.'"));
        }
        fields.push((name.clone(), Accumulator::parse(name, value)?));
    }
    Ok(fields)
}

fn output(name: &str, given: &Document) -> Result<Vec<(String, Accumulator)>> {
    match given.get("output") {
        None => accumulators(&bson::doc! { "count": { "$sum": 1 } }, &[]),
        Some(value) => accumulators(document(name, value)?, &[]),
    }
}

fn variables(name: &str, given: &Document) -> Result<Vec<(String, Expression)>> {
    match given.get("let") {
        None => Ok(Vec::new()),
        Some(value) => document(name, value)?
            .iter()
            .map(|(name, value)| Ok((name.clone(), Expression::parse(value)?)))
            .collect(),
    }
}

fn below(name: &str, value: Option<&Bson>, depth: usize) -> Result<Pipeline> {
    match value {
        None => Ok(Pipeline::default()),
        Some(Bson::Array(stages)) => pipeline(stages, depth + 1),
        Some(_) => fail(Code::TypeMismatch, format!("{name}: a pipeline must be an array")),
    }
}

fn stage(name: &str, argument: &Bson, depth: usize, out: &mut Vec<Stage>) -> Result<()> {
    let parsed = match name {
        "$match" => match argument {
            Bson::Document(filter) => Stage::Match(Filter::parse(filter)?),
            _ => {
                return fail(
                    Code::ShapeOfMatch,
                    "the match filter must be an expression in an object",
                );
            }
        },
        "$project" => match Projection::parse(document(name, argument)?, Dialect::Aggregate)? {
            Some(projection) => Stage::Project(projection),
            None => return Ok(()),
        },
        "$addFields" | "$set" => Stage::Project(Projection::adding(document(name, argument)?)?),
        "$unset" => {
            let names = match argument {
                Bson::String(name) => vec![name.clone()],
                Bson::Array(all) if !all.is_empty() => all
                    .iter()
                    .map(|one| {
                        one.as_str()
                            .map_or_else(|| bad("$unset takes strings"), |name| Ok(name.to_owned()))
                    })
                    .collect::<Result<_>>()?,
                _ => return bad("$unset specification must be a string or an array"),
            };
            Stage::Project(Projection::without(&names)?)
        }
        "$group" => {
            let given = match argument {
                Bson::Document(given) => given,
                _ => return fail(Code::GroupShape, "a group specification must be an object"),
            };
            let Some(id) = given.get("_id") else {
                return fail(Code::GroupShape, "a group specification must include an _id");
            };
            Stage::Group(Group::new(Expression::parse(id)?, accumulators(given, &["_id"])?, None))
        }
        "$sort" => {
            let given = document(name, argument)?;
            if given.is_empty() {
                return fail(Code::BadValue, "$sort stage must have at least one sort key");
            }
            Stage::Sort(Order::parse(given)?, None, Kept::default())
        }
        "$limit" => Stage::Limit(natural(name, argument, 1)?, 0),
        "$skip" => Stage::Skip(natural(name, argument, 0)?, 0),
        "$unwind" => {
            let plain = bson::doc! { "path": argument.clone() };
            let given = if let Bson::Document(given) = argument { given } else { &plain };
            let index = match given.get("includeArrayIndex") {
                None => None,
                Some(Bson::String(index)) if !index.is_empty() && !index.starts_with('$') => {
                    Some(path::split(index)?)
                }
                Some(_) => {
                    return fail(
                        Code::UnwindShape,
                        "expected a non-empty string for the includeArrayIndex option to $unwind stage",
                    );
                }
            };
            let keep_empty =
                matches!(given.get("preserveNullAndEmptyArrays"), Some(Bson::Boolean(true)));
            Stage::Unwind(Unwind {
                path: field_path(name, text(name, given, "path")?)?,
                index,
                keep_empty,
            })
        }
        "$lookup" => {
            let given = document(name, argument)?;
            let fields = match (given.get("localField"), given.get("foreignField")) {
                (Some(Bson::String(local)), Some(Bson::String(foreign))) => {
                    Some((path::split(local)?, path::split(foreign)?))
                }
                (None, None) if given.contains_key("pipeline") => None,
                _ => {
                    return fail(
                        Code::FailedToParse,
                        "$lookup requires either 'pipeline' or both 'localField' and 'foreignField' to be specified",
                    );
                }
            };
            let from = match given.get("from") {
                Some(Bson::String(from)) => Some(from.clone()),
                None => None,
                Some(_) => {
                    return fail(
                        Code::FailedToParse,
                        "$lookup: 'from' must be a collection of the same database",
                    );
                }
            };
            Stage::Lookup(Box::new(Lookup {
                from,
                fields,
                variables: variables(name, given)?,
                pipeline: below(name, given.get("pipeline"), depth)?,
                into: path::split(text(name, given, "as")?)?,
            }))
        }
        "$graphLookup" => {
            let given = document(name, argument)?;
            let Some(start) = given.get("startWith") else {
                return fail(Code::FailedToParse, "$graphLookup requires 'startWith'");
            };
            let depth_field = given.get_str("depthField").ok().map(path::split).transpose()?;
            let restrict = match given.get("restrictSearchWithMatch") {
                Some(Bson::Document(filter)) => Some(Filter::parse(filter)?),
                _ => None,
            };
            Stage::GraphLookup(Box::new(GraphLookup {
                from: text(name, given, "from")?.to_owned(),
                start: Expression::parse(start)?,
                connect_from: path::split(text(name, given, "connectFromField")?)?,
                connect_to: path::split(text(name, given, "connectToField")?)?,
                into: path::split(text(name, given, "as")?)?,
                depth: given.get("maxDepth").and_then(integral),
                depth_field,
                restrict,
            }))
        }
        "$count" => match argument {
            Bson::String(field)
                if !field.is_empty() && !field.starts_with('$') && !field.contains('.') =>
            {
                Stage::Count(field.clone(), 0)
            }
            _ => return fail(Code::CountShape, "the count field must be a non-empty string"),
        },
        "$sortByCount" => {
            let counted = accumulators(&bson::doc! { "count": { "$sum": 1 } }, &[])?;
            out.push(Stage::Group(Group::new(Expression::parse(argument)?, counted, None)));
            Stage::Sort(Order::parse(&bson::doc! { "count": -1 })?, None, Kept::default())
        }
        "$facet" => {
            let given = document(name, argument)?;
            if given.is_empty() {
                return fail(
                    Code::FacetShape,
                    "the $facet specification must be a non-empty object",
                );
            }
            let mut facets = Vec::new();
            for (field, stages) in given {
                facets.push((field.clone(), below(name, Some(stages), depth)?, Vec::new()));
            }
            Stage::Facet(facets, Lease::default())
        }
        "$bucket" => {
            let given = document(name, argument)?;
            let (Some(by), Some(Bson::Array(bounds))) =
                (given.get("groupBy"), given.get("boundaries"))
            else {
                return fail(
                    Code::BucketShape,
                    "$bucket requires 'groupBy' and 'boundaries' to be specified.",
                );
            };
            if bounds.len() < 2
                || !bounds.windows(2).all(|pair| compare(&pair[0], &pair[1]).is_lt())
            {
                return fail(
                    Code::BucketShape,
                    "the $bucket 'boundaries' must be in strictly ascending order, and at least two",
                );
            }
            let buckets = Buckets { bounds: bounds.clone(), other: given.get("default").cloned() };
            Stage::Bucket(Box::new(Group::new(
                Expression::parse(by)?,
                output(name, given)?,
                Some(buckets),
            )))
        }
        "$bucketAuto" => {
            let given = document(name, argument)?;
            let (Some(by), Some(count)) = (given.get("groupBy"), given.get("buckets")) else {
                return fail(
                    Code::BucketShape,
                    "$bucketAuto requires 'groupBy' and 'buckets' to be specified.",
                );
            };
            let count = natural(name, count, 1)? as usize;
            let group = Group::new(Expression::parse(by)?, output(name, given)?, None);
            Stage::BucketAuto(Box::new(group), count, Kept::default())
        }
        "$replaceRoot" => match document(name, argument)?.get("newRoot") {
            Some(root) => Stage::ReplaceRoot(Expression::parse(root)?),
            None => {
                return fail(
                    Code::FailedToParse,
                    "no newRoot specified for the $replaceRoot stage",
                );
            }
        },
        "$replaceWith" => Stage::ReplaceRoot(Expression::parse(argument)?),
        "$redact" => Stage::Redact(Expression::parse(argument)?),
        "$sample" => match document(name, argument)?.get("size") {
            Some(size) => Stage::Sample(natural(name, size, 0)? as usize, Kept::default(), 0),
            None => return fail(Code::FailedToParse, "$sample stage must specify a size"),
        },
        "$unionWith" => match argument {
            Bson::String(collection) => {
                Stage::UnionWith(Some(collection.clone()), Pipeline::default())
            }
            other => {
                let given = document(name, other)?;
                let collection = match given.get("coll") {
                    None if given.contains_key("pipeline") => None,
                    _ => Some(text(name, given, "coll")?.to_owned()),
                };
                Stage::UnionWith(collection, below(name, given.get("pipeline"), depth)?)
            }
        },
        "$out" => Stage::Sink(match argument {
            Bson::String(collection) => Sink::Out(None, collection.clone()),
            Bson::Document(given) => Sink::Out(
                Some(text(name, given, "db")?.to_owned()),
                text(name, given, "coll")?.to_owned(),
            ),
            _ => return fail(Code::FailedToParse, "$out takes a string or an object"),
        }),
        "$merge" => Stage::Sink(Sink::Merge(Box::new(merge(argument, depth)?))),
        source if SOURCES.contains(&source) => Stage::Source(
            source.to_owned(),
            match argument {
                Bson::Document(given) => given.clone(),
                other => bson::doc! { "argument": other.clone() },
            },
        ),
        "$geoNear" | "$search" | "$vectorSearch" | "$densify" | "$fill" | "$setWindowFields" => {
            return fail(
                Code::CommandNotSupported,
                format!("{name} is not supported by this server"),
            );
        }
        other => {
            return fail(
                Code::StageUnknown,
                format!("Unrecognized pipeline stage name: '{other}'"),
            );
        }
    };
    out.push(parsed);
    Ok(())
}

fn merge(argument: &Bson, depth: usize) -> Result<Merge> {
    let name = "$merge";
    let plain = bson::doc! { "into": argument.clone() };
    let given = match argument {
        Bson::Document(given) if given.contains_key("into") => given,
        _ => &plain,
    };
    let (database, collection) = match given.get("into") {
        Some(Bson::String(collection)) => (None, collection.clone()),
        Some(Bson::Document(into)) => {
            (into.get_str("db").ok().map(str::to_owned), text(name, into, "coll")?.to_owned())
        }
        _ => return fail(Code::FailedToParse, "$merge: 'into' must be a string or an object"),
    };
    let on = match given.get("on") {
        None => Vec::new(),
        Some(Bson::String(field)) => vec![field.clone()],
        Some(Bson::Array(all)) => all.iter().filter_map(Bson::as_str).map(str::to_owned).collect(),
        Some(_) => {
            return fail(
                Code::TypeMismatch,
                "$merge: 'on' must be a string or an array of strings",
            );
        }
    };
    let (matched, stages) = match given.get("whenMatched") {
        None => ("merge".to_owned(), None),
        Some(Bson::String(word))
            if matches!(word.as_str(), "replace" | "keepExisting" | "merge" | "fail") =>
        {
            (word.clone(), None)
        }
        Some(stages @ Bson::Array(_)) => {
            ("pipeline".to_owned(), Some(below(name, Some(stages), depth)?))
        }
        Some(other) => {
            return bad(format!(
                "Enumeration value {other} for field 'whenMatched' is not a valid value."
            ));
        }
    };
    let unmatched = match given.get("whenNotMatched") {
        None => "insert".to_owned(),
        Some(Bson::String(word)) if matches!(word.as_str(), "insert" | "discard" | "fail") => {
            word.clone()
        }
        Some(other) => {
            return bad(format!(
                "Enumeration value {other} for field 'whenNotMatched' is not a valid value."
            ));
        }
    };
    Ok(Merge {
        database,
        collection,
        on,
        matched,
        pipeline: stages,
        variables: variables(name, given)?,
        unmatched,
    })
}
