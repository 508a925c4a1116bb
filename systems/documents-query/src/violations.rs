//! Why a validator refuses a document, in the shape in which MongoDB tells it (`errInfo.details`).
//!
//! Made from the validator as it was given, only once a document was refused: checking itself
//! ([`Filter`], [`Schema`]) keeps none of what is told here.

use bson::{Bson, Document, doc};

use crate::matching::Filter;
use crate::path;
use crate::schema::Schema;
use crate::value::type_name;

/// What of `validator` the document does not satisfy. Of a document that satisfies it, or of a
/// validator that cannot be parsed, nothing: an empty document.
#[must_use]
pub fn details(validator: &Document, document: &Document) -> Document {
    let clauses: Vec<Document> =
        validator.iter().map(|(name, value)| doc! { name.clone(): value.clone() }).collect();
    match clauses.as_slice() {
        [only] => clause(only, document).unwrap_or_default(),
        all => unsatisfied("$and", all, document).unwrap_or_default(),
    }
}

fn satisfies(filter: &Document, document: &Document) -> bool {
    Filter::parse(filter).is_ok_and(|filter| filter.matches(document))
}

fn unsatisfied(name: &str, clauses: &[Document], document: &Document) -> Option<Document> {
    let failed: Vec<Bson> = clauses
        .iter()
        .enumerate()
        .filter(|(_, clause)| !satisfies(clause, document))
        .map(|(index, clause)| {
            Bson::Document(doc! { "index": index as i32, "details": details(clause, document) })
        })
        .collect();
    (!failed.is_empty()).then(|| doc! { "operatorName": name, "clausesNotSatisfied": failed })
}

/// One field or operator of a filter.
fn clause(filter: &Document, document: &Document) -> Option<Document> {
    if satisfies(filter, document) {
        return None;
    }
    let (name, value) = filter.iter().next()?;
    let clauses = || -> Vec<Document> {
        value.as_array().into_iter().flatten().filter_map(Bson::as_document).cloned().collect()
    };
    Some(match (name.as_str(), value) {
        ("$jsonSchema", Bson::Document(schema)) => {
            let mut told = doc! { "operatorName": "$jsonSchema" };
            annotate(&mut told, schema);
            told.insert(
                "schemaRulesNotSatisfied",
                rules(schema, &Bson::Document(document.clone())),
            );
            told
        }
        ("$and" | "$or", _) => unsatisfied(name, &clauses(), document)?,
        ("$nor", _) => {
            let matched = clauses().into_iter().enumerate();
            let matched = matched.filter(|(_, clause)| satisfies(clause, document));
            let matched = matched.map(|(index, _)| Bson::Document(doc! { "index": index as i32 }));
            doc! { "operatorName": "$nor", "clausesSatisfied": matched.collect::<Vec<Bson>>() }
        }
        ("$expr", _) => {
            doc! { "operatorName": "$expr", "specifiedAs": filter.clone(), "reason": "expression did not match", "expressionResult": false }
        }
        (_, Bson::Document(operators))
            if operators.keys().next().is_some_and(|first| first.starts_with('$')) =>
        {
            let all: Vec<Document> = operators
                .iter()
                .filter(|(operator, _)| *operator != "$options")
                .map(|(operator, argument)| {
                    let mut one = doc! { operator.clone(): argument.clone() };
                    if let ("$regex", Some(options)) =
                        (operator.as_str(), operators.get("$options"))
                    {
                        one.insert("$options", options.clone());
                    }
                    doc! { name.clone(): one }
                })
                .collect();
            match all.as_slice() {
                [only] => comparison(name, only, document),
                all => unsatisfied("$and", all, document)?,
            }
        }
        _ => comparison(name, filter, document),
    })
}

/// A condition on one field.
fn comparison(name: &str, filter: &Document, document: &Document) -> Document {
    let operator = match filter.get(name) {
        Some(Bson::Document(operators)) => {
            operators.keys().next().filter(|first| first.starts_with('$')).cloned()
        }
        _ => None,
    };
    let operator = operator.unwrap_or_else(|| "$eq".to_owned());
    let parts: Vec<String> = name.split('.').map(str::to_owned).collect();
    let found = path::get_in(document, &parts);
    let reason = match (operator.as_str(), &found) {
        ("$exists", None) => "path does not exist",
        ("$exists", Some(_)) => "path does exist",
        (_, None) => "field was missing",
        ("$type", _) => "type did not match",
        ("$regex", _) => "regular expression did not match",
        ("$in", _) => "no matching value found in array",
        ("$nin", _) => "matching value found in array",
        ("$not", _) => "child expression matched",
        ("$size", _) => "array length was not equal to given size",
        _ => "comparison failed",
    };
    let mut told =
        doc! { "operatorName": operator.clone(), "specifiedAs": filter.clone(), "reason": reason };
    if let Some(found) = found.filter(|_| operator != "$exists") {
        if operator == "$type" {
            told.insert("consideredType", type_name(&found));
        }
        told.insert("consideredValue", found);
    }
    told
}

/// What a schema says of itself for the reader of a refusal.
fn annotate(told: &mut Document, schema: &Document) {
    for word in ["title", "description"] {
        if let Some(text) = schema.get(word) {
            told.insert(word, text.clone());
        }
    }
}

fn allows(schema: &Document, value: &Bson) -> bool {
    Schema::parse(schema).is_ok_and(|schema| schema.allows_value(value))
}

/// The rules of a schema that a value does not satisfy.
fn rules(schema: &Document, value: &Bson) -> Vec<Bson> {
    let told = schema.iter().filter_map(|(name, argument)| rule(schema, name, argument, value));
    told.map(Bson::Document).collect()
}

fn rule(schema: &Document, name: &str, argument: &Bson, value: &Bson) -> Option<Document> {
    let mut alone = doc! { name: argument.clone() };
    for (word, with) in [
        ("minimum", "exclusiveMinimum"),
        ("maximum", "exclusiveMaximum"),
        ("items", "additionalItems"),
        ("additionalProperties", "properties"),
        ("additionalProperties", "patternProperties"),
    ] {
        if let Some(given) = schema.get(with).filter(|_| word == name) {
            alone.insert(with, given.clone());
        }
    }
    if matches!(name, "exclusiveMinimum" | "exclusiveMaximum" | "additionalItems")
        || allows(&alone, value)
    {
        return None;
    }
    let specified = doc! { name: argument.clone() };
    let fields = value.as_document();
    let below = |index: usize, one: &Bson| {
        let inner = one.as_document().map(|one| rules(one, value)).unwrap_or_default();
        Bson::Document(doc! { "index": index as i32, "details": inner })
    };
    let branches = argument.as_array().map(Vec::as_slice).unwrap_or_default();
    let matching = |one: &Bson| one.as_document().is_some_and(|one| allows(one, value));
    let told = match name {
        "required" => {
            let lacking = branches.iter().filter(|field| {
                field.as_str().is_none_or(|field| fields.is_none_or(|all| !all.contains_key(field)))
            });
            doc! { "operatorName": name, "specifiedAs": specified, "missingProperties": lacking.cloned().collect::<Vec<Bson>>() }
        }
        "properties" => {
            let failed = argument.as_document()?.iter().filter_map(|(field, below)| {
                let (below, found) = (below.as_document()?, fields?.get(field)?);
                if allows(below, found) {
                    return None;
                }
                let mut told = doc! { "propertyName": field.clone() };
                annotate(&mut told, below);
                told.insert("details", rules(below, found));
                Some(Bson::Document(told))
            });
            doc! { "operatorName": name, "propertiesNotSatisfied": failed.collect::<Vec<Bson>>() }
        }
        "additionalProperties" => {
            let mut rest = alone.clone();
            rest.remove("properties");
            let known = alone.get_document("properties").ok();
            let more = fields?.iter().filter(|(field, value)| {
                !known.is_some_and(|known| known.contains_key(field))
                    && !allows(&rest, &Bson::Document(doc! { (*field).clone(): (*value).clone() }))
            });
            let more: Vec<Bson> = more.map(|(field, _)| Bson::String(field.clone())).collect();
            doc! { "operatorName": name, "specifiedAs": specified, "additionalProperties": more }
        }
        "allOf" | "anyOf" => {
            let failed = branches.iter().enumerate().filter(|(_, one)| !matching(one));
            doc! { "operatorName": name, "schemasNotSatisfied": failed.map(|(at, one)| below(at, one)).collect::<Vec<Bson>>() }
        }
        "oneOf" => {
            let matched = branches.iter().enumerate().filter(|(_, one)| matching(one));
            let matched: Vec<i32> = matched.map(|(at, _)| at as i32).collect();
            if matched.is_empty() {
                let failed = branches.iter().enumerate();
                doc! { "operatorName": name, "schemasNotSatisfied": failed.map(|(at, one)| below(at, one)).collect::<Vec<Bson>>() }
            } else {
                doc! { "operatorName": name, "reason": "more than one subschema matched", "matchingSchemaIndexes": matched }
            }
        }
        "not" => doc! { "operatorName": name, "reason": "child expression matched" },
        "items" if argument.as_document().is_some() => {
            let (schema, all) = (argument.as_document()?, value.as_array()?);
            let (at, one) = all.iter().enumerate().find(|(_, one)| !allows(schema, one))?;
            doc! { "operatorName": name, "reason": "At least one item did not match the sub-schema", "itemIndex": at as i32, "details": rules(schema, one) }
        }
        "minProperties" | "maxProperties" => {
            doc! { "operatorName": name, "specifiedAs": specified, "reason": "specified number of properties was not satisfied", "numberOfProperties": fields?.len() as i32 }
        }
        _ => {
            let reason = match name {
                "bsonType" | "type" => "type did not match",
                "enum" => "value was not found in enum",
                "minLength" | "maxLength" => "specified string length was not satisfied",
                "pattern" => "regular expression did not match",
                "minItems" | "maxItems" => "array did not match specified length",
                "uniqueItems" => "found a duplicate item",
                "multipleOf" => "considered value is not a multiple of the specified value",
                _ => "comparison failed",
            };
            let mut told = doc! { "operatorName": name, "specifiedAs": specified, "reason": reason, "consideredValue": value.clone() };
            if matches!(name, "bsonType" | "type") {
                told.insert("consideredType", type_name(value));
            }
            told
        }
    };
    Some(told)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(validator: Document, document: Document) -> Document {
        assert!(!satisfies(&validator, &document));
        details(&validator, &document)
    }

    #[test]
    fn a_schema_tells_each_rule_that_a_document_breaks() {
        let schema = doc! { "bsonType": "object", "title": "people", "required": ["name", "born"], "properties": {
            "name": { "bsonType": "string", "description": "what they are called" },
            "age": { "bsonType": "int", "minimum": 0, "exclusiveMinimum": true },
            "tags": { "items": { "enum": ["a", "b"] } },
        } };
        let document = doc! { "_id": 1, "name": 5, "age": 0, "tags": ["a", "c"] };
        assert_eq!(
            told(doc! { "$jsonSchema": schema }, document),
            doc! { "operatorName": "$jsonSchema", "title": "people", "schemaRulesNotSatisfied": [
                { "operatorName": "required", "specifiedAs": { "required": ["name", "born"] }, "missingProperties": ["born"] },
                { "operatorName": "properties", "propertiesNotSatisfied": [
                    { "propertyName": "name", "description": "what they are called", "details": [
                        { "operatorName": "bsonType", "specifiedAs": { "bsonType": "string" }, "reason": "type did not match", "consideredValue": 5, "consideredType": "int" } ] },
                    { "propertyName": "age", "details": [
                        { "operatorName": "minimum", "specifiedAs": { "minimum": 0 }, "reason": "comparison failed", "consideredValue": 0 } ] },
                    { "propertyName": "tags", "details": [
                        { "operatorName": "items", "reason": "At least one item did not match the sub-schema", "itemIndex": 1, "details": [
                            { "operatorName": "enum", "specifiedAs": { "enum": ["a", "b"] }, "reason": "value was not found in enum", "consideredValue": "c" } ] } ] },
                ] },
            ] }
        );
        let closed = doc! { "$jsonSchema": { "additionalProperties": false, "properties": { "_id": {} }, "oneOf": [{ "minProperties": 1 }, {}] } };
        assert_eq!(
            told(closed, doc! { "_id": 1, "x": 2 }).get_array("schemaRulesNotSatisfied").unwrap(),
            &[
                Bson::Document(
                    doc! { "operatorName": "additionalProperties", "specifiedAs": { "additionalProperties": false }, "additionalProperties": ["x"] }
                ),
                Bson::Document(
                    doc! { "operatorName": "oneOf", "reason": "more than one subschema matched", "matchingSchemaIndexes": [0, 1] }
                ),
            ]
        );
    }

    #[test]
    fn a_filter_tells_the_operator_that_failed() {
        assert_eq!(
            told(doc! { "a": { "$gt": 5 } }, doc! { "a": 1 }),
            doc! { "operatorName": "$gt", "specifiedAs": { "a": { "$gt": 5 } }, "reason": "comparison failed", "consideredValue": 1 }
        );
        assert_eq!(
            told(doc! { "a": 1, "b.c": { "$type": "string" } }, doc! { "a": 1, "b": { "c": 2 } }),
            doc! { "operatorName": "$and", "clausesNotSatisfied": [{ "index": 1, "details": {
                "operatorName": "$type", "specifiedAs": { "b.c": { "$type": "string" } }, "reason": "type did not match", "consideredType": "int", "consideredValue": 2,
            } }] }
        );
        let missing = told(doc! { "$or": [{ "a": 1 }, { "a": { "$exists": true } }] }, doc! {});
        assert_eq!(
            missing.get_array("clausesNotSatisfied").unwrap()[1],
            Bson::Document(doc! { "index": 1, "details": {
            "operatorName": "$exists", "specifiedAs": { "a": { "$exists": true } }, "reason": "path does not exist" } })
        );
        let computed = told(doc! { "$expr": { "$gt": ["$a", 2] } }, doc! { "a": 1 });
        assert_eq!(computed.get_str("reason").unwrap(), "expression did not match");
    }
}
