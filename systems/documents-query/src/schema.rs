//! `$jsonSchema`: the part of JSON Schema draft 4 that MongoDB has, with `bsonType`.

use std::collections::BTreeSet;

use bson::{Bson, Document};

use crate::error::{Code, Result, fail};
use crate::matching::type_codes;
use crate::regex::Pattern;
use crate::value::{compare, integral, is_number, key, number, type_number};

/// A parsed schema.
#[derive(Clone, Debug, Default)]
pub struct Schema {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
enum Rule {
    Type(Vec<i32>, bool),
    Enum(Vec<Bson>),
    Least(f64, bool),
    Most(f64, bool),
    Multiple(f64),
    Letters(usize, usize),
    Pattern(Pattern),
    Elements(usize, usize),
    Unique,
    Items(Box<Schema>),
    Tuple(Vec<Schema>, Option<Box<Schema>>, bool),
    Required(Vec<String>),
    Properties(Vec<(String, Schema)>, Vec<(Pattern, Schema)>, Option<Box<Schema>>, bool),
    Fields(usize, usize),
    Needs(Vec<(String, Vec<String>)>),
    All(Vec<Schema>),
    Any(Vec<Schema>),
    One(Vec<Schema>),
    Not(Box<Schema>),
}

fn wrong<T>(what: &str) -> Result<T> {
    fail(Code::FailedToParse, format!("$jsonSchema: {what}"))
}

impl Schema {
    /// Parses a schema.
    ///
    /// Errors: an unknown keyword, a keyword's argument of a wrong type.
    pub fn parse(source: &Document) -> Result<Self> {
        Self::parse_at(source, 0)
    }

    fn parse_at(source: &Document, depth: usize) -> Result<Self> {
        if depth > 50 {
            return fail(Code::Overflow, "$jsonSchema is nested too deeply");
        }
        let of = |value: &Bson| match value {
            Bson::Document(inner) => Self::parse_at(inner, depth + 1),
            _ => wrong("a schema must be an object"),
        };
        let list = |value: &Bson| match value {
            Bson::Array(all) if !all.is_empty() => all.iter().map(of).collect::<Result<Vec<_>>>(),
            _ => wrong("allOf, anyOf and oneOf need a nonempty array"),
        };
        let size = |value: &Bson| match integral(value) {
            Some(size) if size >= 0 => Ok(size as usize),
            _ => wrong("a length must be a non-negative integer"),
        };
        let bound =
            |value: &Bson| number(value).map_or_else(|| wrong("a bound must be a number"), Ok);
        let names = |value: &Bson| match value {
            Bson::Array(all) => all
                .iter()
                .map(|name| {
                    name.as_str()
                        .map_or_else(|| wrong("names must be strings"), |name| Ok(name.to_owned()))
                })
                .collect::<Result<Vec<_>>>(),
            _ => wrong("an array of names is needed"),
        };
        let flag = |name: &str| matches!(source.get(name), Some(Bson::Boolean(true)));
        let mut rules = Vec::new();
        for (name, value) in source {
            rules.push(match name.as_str() {
                "bsonType" => {
                    let (codes, numbers) = type_codes(value)?;
                    Rule::Type(codes, numbers)
                }
                "type" => json_type(value)?,
                "enum" => match value {
                    Bson::Array(all) if !all.is_empty() => Rule::Enum(all.clone()),
                    _ => return wrong("enum must be a nonempty array"),
                },
                "minimum" => Rule::Least(bound(value)?, flag("exclusiveMinimum")),
                "maximum" => Rule::Most(bound(value)?, flag("exclusiveMaximum")),
                "multipleOf" => match bound(value)? {
                    by if by > 0.0 => Rule::Multiple(by),
                    _ => return wrong("multipleOf must be positive"),
                },
                "minLength" => Rule::Letters(size(value)?, usize::MAX),
                "maxLength" => Rule::Letters(0, size(value)?),
                "pattern" => match value {
                    Bson::String(pattern) => Rule::Pattern(Pattern::new(pattern, "")?),
                    _ => return wrong("pattern must be a string"),
                },
                "minItems" => Rule::Elements(size(value)?, usize::MAX),
                "maxItems" => Rule::Elements(0, size(value)?),
                "uniqueItems" if flag("uniqueItems") => Rule::Unique,
                "items" => match value {
                    Bson::Array(all) => {
                        let rest = match source.get("additionalItems") {
                            Some(rest @ Bson::Document(_)) => Some(Box::new(of(rest)?)),
                            _ => None,
                        };
                        let open =
                            !matches!(source.get("additionalItems"), Some(Bson::Boolean(false)));
                        Rule::Tuple(all.iter().map(of).collect::<Result<_>>()?, rest, open)
                    }
                    one => Rule::Items(Box::new(of(one)?)),
                },
                "required" => Rule::Required(names(value)?),
                "minProperties" => Rule::Fields(size(value)?, usize::MAX),
                "maxProperties" => Rule::Fields(0, size(value)?),
                "dependencies" => match value {
                    Bson::Document(all) => Rule::Needs(
                        all.iter()
                            .map(|(name, needs)| Ok((name.clone(), names(needs)?)))
                            .collect::<Result<_>>()?,
                    ),
                    _ => return wrong("dependencies must be an object"),
                },
                "allOf" => Rule::All(list(value)?),
                "anyOf" => Rule::Any(list(value)?),
                "oneOf" => Rule::One(list(value)?),
                "not" => Rule::Not(Box::new(of(value)?)),
                "properties"
                | "patternProperties"
                | "additionalProperties"
                | "additionalItems"
                | "exclusiveMinimum"
                | "exclusiveMaximum"
                | "uniqueItems"
                | "title"
                | "description" => continue,
                other => return wrong(&format!("Unknown $jsonSchema keyword: {other}")),
            });
        }
        let object = |name: &str| match source.get(name) {
            None => Ok(None),
            Some(Bson::Document(inner)) => Ok(Some(inner)),
            Some(_) => wrong(&format!("{name} must be an object")),
        };
        let (own, patterns) = (object("properties")?, object("patternProperties")?);
        let rest = source.get("additionalProperties");
        if own.is_some() || patterns.is_some() || rest.is_some() {
            let own =
                own.into_iter().flatten().map(|(name, schema)| Ok((name.clone(), of(schema)?)));
            let patterns = patterns
                .into_iter()
                .flatten()
                .map(|(pattern, schema)| Ok((Pattern::new(pattern, "")?, of(schema)?)));
            let other = match rest {
                Some(schema @ Bson::Document(_)) => Some(Box::new(of(schema)?)),
                _ => None,
            };
            let open = !matches!(rest, Some(Bson::Boolean(false)));
            rules.push(Rule::Properties(
                own.collect::<Result<_>>()?,
                patterns.collect::<Result<_>>()?,
                other,
                open,
            ));
        }
        Ok(Self { rules })
    }

    /// Whether a document follows it.
    #[must_use]
    pub fn allows(&self, document: &Document) -> bool {
        // Rules about the whole look at it as a value.
        let mut whole = None;
        self.rules.iter().all(|rule| match rule {
            Rule::Required(_) | Rule::Properties(..) | Rule::Fields(..) | Rule::Needs(_) => {
                rule.allows_fields(document)
            }
            other => other.allows(whole.get_or_insert_with(|| Bson::Document(document.clone()))),
        })
    }

    pub(crate) fn allows_value(&self, value: &Bson) -> bool {
        self.rules.iter().all(|rule| rule.allows(value))
    }
}

fn json_type(value: &Bson) -> Result<Rule> {
    let all = match value {
        Bson::Array(all) => all.as_slice(),
        one => std::slice::from_ref(one),
    };
    let (mut codes, mut numbers) = (Vec::new(), false);
    for name in all {
        match name.as_str() {
            Some("object") => codes.push(3),
            Some("array") => codes.push(4),
            Some("string") => codes.push(2),
            Some("boolean") => codes.push(8),
            Some("null") => codes.push(10),
            Some("number") => numbers = true,
            Some("integer") => {
                return wrong("$jsonSchema type 'integer' is not currently supported.");
            }
            _ => return wrong("unknown type name"),
        }
    }
    Ok(Rule::Type(codes, numbers))
}

impl Rule {
    fn allows_fields(&self, document: &Document) -> bool {
        match self {
            Self::Required(names) => names.iter().all(|name| document.contains_key(name)),
            Self::Fields(least, most) => (*least..=*most).contains(&document.len()),
            Self::Needs(all) => all.iter().all(|(name, needs)| {
                !document.contains_key(name) || needs.iter().all(|need| document.contains_key(need))
            }),
            Self::Properties(own, patterns, rest, open) => document.iter().all(|(name, value)| {
                let mut known = false;
                for (_, schema) in own.iter().filter(|(own, _)| own == name) {
                    known = true;
                    if !schema.allows_value(value) {
                        return false;
                    }
                }
                for (_, schema) in patterns.iter().filter(|(pattern, _)| pattern.is_match(name)) {
                    known = true;
                    if !schema.allows_value(value) {
                        return false;
                    }
                }
                known || rest.as_ref().map_or(*open, |rest| rest.allows_value(value))
            }),
            _ => true,
        }
    }

    fn allows(&self, value: &Bson) -> bool {
        match (self, value) {
            (Self::Type(codes, numbers), value) => {
                codes.contains(&type_number(value)) || (*numbers && is_number(value))
            }
            (Self::Enum(all), value) => all.iter().any(|one| compare(one, value).is_eq()),
            (Self::Least(bound, exclusive), value) => number(value)
                .is_none_or(|value| if *exclusive { value > *bound } else { value >= *bound }),
            (Self::Most(bound, exclusive), value) => number(value)
                .is_none_or(|value| if *exclusive { value < *bound } else { value <= *bound }),
            (Self::Multiple(by), value) => number(value).is_none_or(|value| value % by == 0.0),
            (Self::Letters(least, most), Bson::String(text)) => {
                (*least..=*most).contains(&text.chars().count())
            }
            (Self::Pattern(pattern), Bson::String(text)) => pattern.is_match(text),
            (Self::Elements(least, most), Bson::Array(all)) => {
                (*least..=*most).contains(&all.len())
            }
            (Self::Unique, Bson::Array(all)) => {
                all.iter().map(key).collect::<BTreeSet<_>>().len() == all.len()
            }
            (Self::Items(schema), Bson::Array(all)) => {
                all.iter().all(|one| schema.allows_value(one))
            }
            (Self::Tuple(schemas, rest, open), Bson::Array(all)) => {
                all.iter().enumerate().all(|(at, one)| match (schemas.get(at), rest) {
                    (Some(schema), _) => schema.allows_value(one),
                    (None, Some(rest)) => rest.allows_value(one),
                    (None, None) => *open,
                })
            }
            (
                Self::Required(_) | Self::Properties(..) | Self::Fields(..) | Self::Needs(_),
                Bson::Document(document),
            ) => self.allows_fields(document),
            (Self::All(all), value) => all.iter().all(|one| one.allows_value(value)),
            (Self::Any(all), value) => all.iter().any(|one| one.allows_value(value)),
            (Self::One(all), value) => {
                all.iter().filter(|one| one.allows_value(value)).count() == 1
            }
            (Self::Not(one), value) => !one.allows_value(value),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn a_schema_says_yes_and_no() {
        let schema = Schema::parse(&doc! {
            "bsonType": "object", "required": ["name", "age"], "additionalProperties": false,
            "properties": {
                "_id": {}, "name": { "bsonType": "string", "minLength": 1 },
                "age": { "bsonType": ["int", "long"], "minimum": 0 },
                "tags": { "bsonType": "array", "uniqueItems": true, "items": { "bsonType": "string" } },
            },
        }).unwrap();
        assert!(schema.allows(&doc! { "name": "x", "age": 1, "tags": ["a", "b"] }));
        for wrong in [
            doc! { "name": "x" },
            doc! { "name": "", "age": 1 },
            doc! { "name": "x", "age": -1 },
            doc! { "name": "x", "age": 1.5 },
            doc! { "name": "x", "age": 1, "tags": ["a", "a"] },
            doc! { "name": "x", "age": 1, "other": 1 },
        ] {
            assert!(!schema.allows(&wrong), "{wrong}");
        }
        assert!(Schema::parse(&doc! { "nonsense": 1 }).is_err());
    }
}
