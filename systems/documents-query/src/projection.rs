//! What of a document is returned: `find`'s projections, `$project`, `$addFields`.

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, MISSING, Scope, sliced};

use crate::matching::{Filter, Predicate};
use crate::path;
use crate::value::{integral, is_number, truthy};

/// A parsed projection.
#[derive(Clone, Debug)]
pub struct Projection {
    mode: Mode,
    root: Vec<(String, Node)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Include,
    Exclude,
    Add,
}

#[derive(Clone, Debug)]
enum Node {
    Include,
    Exclude,
    Compute(Expression),
    Slice(Option<i64>, i64),
    ElementMatch(Filter),
    Position,
    Nested(Vec<(String, Node)>),
}

/// Whose rules hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `find`.
    Find,
    /// `$project`.
    Aggregate,
}

impl Projection {
    /// Parses a projection; `None` for one that keeps everything.
    ///
    /// Errors: inclusion beside exclusion, paths that collide, what MongoDB refuses.
    pub fn parse(source: &Document, dialect: Dialect) -> Result<Option<Self>> {
        if source.is_empty() {
            return match dialect {
                Dialect::Find => Ok(None),
                Dialect::Aggregate => {
                    fail(Code::BadValue, "$project specification must have at least one field")
                }
            };
        }
        let mut root = Vec::new();
        let mut mode = None;
        for (name, value) in source {
            insert(&mut root, name, value, dialect, &mut mode, name == "_id")?;
        }
        let only_id = || source.get("_id").is_none_or(truthy);
        let slices = source.values().any(|value| is_find_operator(value, "$slice"));
        let mode = mode.unwrap_or(if slices || !only_id() { Mode::Exclude } else { Mode::Include });
        Ok(Some(Self { mode, root }))
    }

    /// Parses `$addFields`.
    ///
    /// Errors: those of its expressions, paths that collide.
    pub fn adding(source: &Document) -> Result<Self> {
        if source.is_empty() {
            return bad("$addFields specification stage must have at least one field");
        }
        let mut root = Vec::new();
        for (name, value) in source {
            place_computed(&mut root, name, value)?;
        }
        Ok(Self { mode: Mode::Add, root })
    }

    /// Parses `$unset`.
    ///
    /// Errors: empty or colliding paths.
    pub fn without(names: &[String]) -> Result<Self> {
        let mut root = Vec::new();
        for name in names {
            place(&mut root, &path::split(name)?, Node::Exclude, name)?;
        }
        Ok(Self { mode: Mode::Exclude, root })
    }

    /// True when nothing but top-level fields is kept, so that a field can be skipped unseen.
    #[must_use]
    pub fn keeps_only(&self) -> Option<Vec<&str>> {
        let simple = self.mode == Mode::Include
            && self.root.iter().all(|(_, node)| matches!(node, Node::Include | Node::Exclude));
        simple.then(|| {
            let mut names: Vec<&str> = self
                .root
                .iter()
                .filter(|(_, node)| matches!(node, Node::Include))
                .map(|(name, _)| name.as_str())
                .collect();
            if !self.root.iter().any(|(name, _)| name == "_id") {
                names.push("_id");
            }
            names
        })
    }

    /// Applies it. `filter` is the query's, for `$`.
    ///
    /// Errors: those of its expressions.
    pub fn apply(
        &self,
        document: &Document,
        filter: Option<&Filter>,
        scope: &Scope<'_>,
    ) -> Result<Document> {
        let scope = scope.rooted(document);
        let hint = Hint { filter, root: document };
        let mut out = match self.mode {
            Mode::Include => {
                let mut kept = include(document, &self.root, &hint, &mut Vec::new());
                let id_kept = !self.root.iter().any(|(name, _)| name == "_id");
                if id_kept && let Some(id) = document.get("_id") {
                    let mut with_id = Document::new();
                    with_id.insert("_id", id.clone());
                    with_id.extend(kept);
                    kept = with_id;
                }
                kept
            }
            Mode::Exclude => exclude(document, &self.root),
            Mode::Add => document.clone(),
        };
        compute(&mut out, &self.root, &scope)?;
        Ok(out)
    }
}

struct Hint<'a> {
    filter: Option<&'a Filter>,
    root: &'a Document,
}

fn is_find_operator(value: &Bson, name: &str) -> bool {
    matches!(value, Bson::Document(document) if document.len() == 1 && document.contains_key(name))
}

fn insert(
    root: &mut Vec<(String, Node)>,
    name: &str,
    value: &Bson,
    dialect: Dialect,
    mode: &mut Option<Mode>,
    is_id: bool,
) -> Result<()> {
    let positional = dialect == Dialect::Find && name.ends_with(".$");
    let plain_name = if positional { &name[..name.len() - 2] } else { name };
    if plain_name.starts_with('$') {
        return bad(format!(
            "FieldPath field names may not start with '$'. Consider using $getField or $setField: {name}"
        ));
    }
    let parts = path::split(plain_name)?;
    let node = match value {
        _ if positional => Node::Position,
        Bson::Boolean(_) => {
            if truthy(value) {
                Node::Include
            } else {
                Node::Exclude
            }
        }
        value if is_number(value) => {
            if truthy(value) {
                Node::Include
            } else {
                Node::Exclude
            }
        }
        Bson::Document(inner) if dialect == Dialect::Find && is_find_operator(value, "$slice") => {
            match inner.get("$slice") {
                Some(Bson::Array(pair)) if pair.first().and_then(integral).is_some() => match pair
                    .as_slice()
                {
                    [skip, limit] => match (integral(skip), integral(limit)) {
                        (Some(skip), Some(limit)) if limit > 0 => Node::Slice(Some(skip), limit),
                        _ => return fail(Code::SliceShape, "$slice limit must be positive"),
                    },
                    _ => return fail(Code::SliceShape, "$slice takes one or two numbers"),
                },
                Some(count) if integral(count).is_some() => {
                    Node::Slice(None, integral(count).unwrap_or(0))
                }
                _ => Node::Compute(Expression::parse(value)?),
            }
        }
        Bson::Document(inner)
            if dialect == Dialect::Find && is_find_operator(value, "$elemMatch") =>
        {
            if parts.len() > 1 {
                return bad("Cannot use $elemMatch projection on a nested field");
            }
            match inner.get("$elemMatch") {
                Some(Bson::Document(_)) => {
                    let wrapped = bson::doc! { "v": value.clone() };
                    Node::ElementMatch(Filter::parse(&wrapped)?)
                }
                _ => return bad("elemMatch: Invalid argument, object required"),
            }
        }
        Bson::Document(inner) if !inner.keys().next().is_some_and(|key| key.starts_with('$')) => {
            if inner.is_empty() {
                return bad(
                    "An empty sub-projection is not a valid value. Found empty object at path",
                );
            }
            for (below, value) in inner {
                insert(root, &format!("{name}.{below}"), value, dialect, mode, is_id)?;
            }
            return Ok(());
        }
        other => Node::Compute(Expression::parse(other)?),
    };
    let wanted = match node {
        Node::Exclude => Some(Mode::Exclude),
        Node::Slice(..) => None,
        _ => Some(Mode::Include),
    };
    // The identifier may go either way beside the others.
    let counts = !(is_id && parts.len() == 1 && matches!(node, Node::Include | Node::Exclude));
    if let (Some(wanted), true) = (wanted, counts) {
        match *mode {
            Some(given) if given != wanted => {
                return match wanted {
                    Mode::Exclude => fail(
                        Code::ProjectionMixed,
                        format!("Cannot do exclusion on field {name} in inclusion projection"),
                    ),
                    _ => fail(
                        Code::RemoveOnly,
                        format!("Cannot do inclusion on field {name} in exclusion projection"),
                    ),
                };
            }
            _ => *mode = Some(wanted),
        }
    }
    place(root, &parts, node, name)
}

fn place(root: &mut Vec<(String, Node)>, parts: &[String], node: Node, whole: &str) -> Result<()> {
    let Some((first, rest)) = parts.split_first() else { return Ok(()) };
    let collision = || fail(Code::PathCollision, format!("Path collision at {whole}"));
    let at = root.iter().position(|(name, _)| name == first);
    match (at, rest.is_empty()) {
        (Some(_), true) => collision(),
        (None, true) => {
            root.push((first.clone(), node));
            Ok(())
        }
        (None, false) => {
            let mut below = Vec::new();
            place(&mut below, rest, node, whole)?;
            root.push((first.clone(), Node::Nested(below)));
            Ok(())
        }
        (Some(at), false) => match &mut root[at].1 {
            Node::Nested(below) => place(below, rest, node, whole),
            _ => collision(),
        },
    }
}

fn place_computed(root: &mut Vec<(String, Node)>, name: &str, value: &Bson) -> Result<()> {
    if name.starts_with('$') {
        return fail(
            Code::ExpressionArity,
            format!("FieldPath field names may not start with '$': {name}"),
        );
    }
    match value {
        Bson::Document(inner)
            if !inner.is_empty()
                && !inner.keys().next().is_some_and(|key| key.starts_with('$')) =>
        {
            for (below, value) in inner {
                place_computed(root, &format!("{name}.{below}"), value)?;
            }
            Ok(())
        }
        other => place(root, &path::split(name)?, Node::Compute(Expression::parse(other)?), name),
    }
}

fn include(
    document: &Document,
    nodes: &[(String, Node)],
    hint: &Hint<'_>,
    at: &mut Vec<String>,
) -> Document {
    let mut out = Document::new();
    for (name, value) in document {
        let Some((_, node)) = nodes.iter().find(|(known, _)| known == name) else { continue };
        at.push(name.clone());
        let kept = match (node, value) {
            (Node::Include, value) => Some(value.clone()),
            (Node::Slice(skip, count), Bson::Array(elements)) => {
                Some(Bson::Array(sliced(elements, *skip, *count)))
            }
            (Node::Slice(..), value) => Some(value.clone()),
            (Node::ElementMatch(filter), Bson::Array(elements)) => elements
                .iter()
                .find(|element| is_match(filter, element))
                .map(|element| Bson::Array(vec![element.clone()])),
            (Node::Position, Bson::Array(elements)) => hint
                .filter
                .and_then(|filter| filter.position(hint.root, at))
                .and_then(|position| elements.get(position))
                .map(|element| Bson::Array(vec![element.clone()])),
            (Node::Position, value) => Some(value.clone()),
            (Node::Nested(below), value) => include_nested(value, below, hint, at),
            (Node::Exclude | Node::Compute(_) | Node::ElementMatch(_), _) => None,
        };
        at.pop();
        if let Some(kept) = kept {
            out.insert(name.clone(), kept);
        }
    }
    out
}

fn is_match(filter: &Filter, element: &Bson) -> bool {
    match filter {
        Filter::Field(_, Predicate::ElementMatch(inner)) => {
            matches!(element, Bson::Document(document) if inner.matches(document))
        }
        Filter::Field(_, Predicate::ElementValue(parts)) => {
            parts.iter().all(|part| part.on_element(element))
        }
        _ => false,
    }
}

fn include_nested(
    value: &Bson,
    below: &[(String, Node)],
    hint: &Hint<'_>,
    at: &mut Vec<String>,
) -> Option<Bson> {
    match value {
        Bson::Document(inner) => Some(Bson::Document(include(inner, below, hint, at))),
        Bson::Array(elements) => Some(Bson::Array(
            elements
                .iter()
                .filter_map(|element| match element {
                    Bson::Document(_) | Bson::Array(_) => include_nested(element, below, hint, at),
                    _ => None,
                })
                .collect(),
        )),
        _ => None,
    }
}

fn exclude(document: &Document, nodes: &[(String, Node)]) -> Document {
    let mut out = Document::new();
    for (name, value) in document {
        let kept = match nodes.iter().find(|(known, _)| known == name) {
            None => value.clone(),
            Some((_, Node::Exclude)) => continue,
            Some((_, Node::Slice(skip, count))) => match value {
                Bson::Array(elements) => Bson::Array(sliced(elements, *skip, *count)),
                other => other.clone(),
            },
            Some((_, Node::Nested(below))) => exclude_nested(value, below),
            Some(_) => value.clone(),
        };
        out.insert(name.clone(), kept);
    }
    out
}

fn exclude_nested(value: &Bson, below: &[(String, Node)]) -> Bson {
    match value {
        Bson::Document(inner) => Bson::Document(exclude(inner, below)),
        Bson::Array(elements) => {
            Bson::Array(elements.iter().map(|element| exclude_nested(element, below)).collect())
        }
        other => other.clone(),
    }
}

fn has_computed(nodes: &[(String, Node)]) -> bool {
    nodes.iter().any(|(_, node)| match node {
        Node::Compute(_) => true,
        Node::Nested(below) => has_computed(below),
        _ => false,
    })
}

fn compute(out: &mut Document, nodes: &[(String, Node)], scope: &Scope<'_>) -> Result<()> {
    for (name, node) in nodes {
        match node {
            Node::Compute(expression) => match expression.evaluate(scope)? {
                MISSING => drop(out.remove(name)),
                value => drop(out.insert(name.clone(), value)),
            },
            Node::Nested(below) if has_computed(below) => {
                let slot = out.entry(name.clone()).or_insert(Bson::Document(Document::new()));
                compute_nested(slot, below, scope)?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn compute_nested(slot: &mut Bson, below: &[(String, Node)], scope: &Scope<'_>) -> Result<()> {
    match slot {
        Bson::Document(inner) => compute(inner, below, scope),
        Bson::Array(elements) => {
            elements.iter_mut().try_for_each(|element| compute_nested(element, below, scope))
        }
        other => {
            let mut inner = Document::new();
            compute(&mut inner, below, scope)?;
            *other = Bson::Document(inner);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn project(projection: Document, document: Document) -> Document {
        let parsed = Projection::parse(&projection, Dialect::Find).unwrap().unwrap();
        parsed.apply(&document, None, &Scope::default()).unwrap()
    }

    #[test]
    fn fields_are_kept_dropped_and_computed() {
        let document =
            doc! { "_id": 1, "a": 2, "b": { "c": 3, "d": 4 }, "l": [ { "x": 1, "y": 2 }, 5 ] };
        assert_eq!(project(doc! { "a": 1 }, document.clone()), doc! { "_id": 1, "a": 2 });
        assert_eq!(
            project(doc! { "_id": 0, "b.c": 1 }, document.clone()),
            doc! { "b": { "c": 3 } }
        );
        assert_eq!(
            project(doc! { "l.x": 1, "_id": 0 }, document.clone()),
            doc! { "l": [ { "x": 1 } ] }
        );
        assert_eq!(
            project(doc! { "a": 0, "l.y": 0 }, document.clone()),
            doc! { "_id": 1, "b": { "c": 3, "d": 4 }, "l": [ { "x": 1 }, 5 ] }
        );
        assert_eq!(
            project(doc! { "s": { "$add": ["$a", 1] }, "_id": 0 }, document.clone()),
            doc! { "s": 3 }
        );
        assert_eq!(project(doc! { "_id": 0 }, doc! { "_id": 1, "a": 1 }), doc! { "a": 1 });
        assert_eq!(project(doc! { "_id": 1 }, doc! { "_id": 1, "a": 1 }), doc! { "_id": 1 });
    }

    #[test]
    fn arrays_are_sliced_and_searched() {
        let document = doc! { "_id": 1, "l": [1, 2, 3], "d": [ { "x": 1 }, { "x": 2 } ] };
        assert_eq!(
            project(doc! { "l": { "$slice": -2 } }, document.clone()).get("l"),
            Some(&bson::bson!([2, 3]))
        );
        assert_eq!(
            project(doc! { "l": { "$slice": [1, 1] }, "_id": 1 }, document.clone()).get("l"),
            Some(&bson::bson!([2]))
        );
        assert_eq!(
            project(doc! { "d": { "$elemMatch": { "x": 2 } } }, document.clone()),
            doc! { "_id": 1, "d": [ { "x": 2 } ] }
        );
        let filter = Filter::parse(&doc! { "l": { "$gte": 2 } }).unwrap();
        let parsed = Projection::parse(&doc! { "l.$": 1 }, Dialect::Find).unwrap().unwrap();
        assert_eq!(
            parsed.apply(&document, Some(&filter), &Scope::default()).unwrap(),
            doc! { "_id": 1, "l": [2] }
        );
    }

    #[test]
    fn fields_are_added_in_place() {
        let adding = Projection::adding(&doc! { "a.b": 1, "c": "$a", "d": "$$REMOVE" }).unwrap();
        let document = doc! { "a": { "x": 1 }, "d": 5 };
        assert_eq!(
            adding.apply(&document, None, &Scope::default()).unwrap(),
            doc! { "a": { "x": 1, "b": 1 }, "c": { "x": 1 } }
        );
    }

    #[test]
    fn contradictions_are_refused() {
        for projection in [
            doc! { "a": 1, "b": 0 },
            doc! { "a": 0, "b": 1 },
            doc! { "a": 1, "a.b": 1 },
            doc! { "$a": 1 },
        ] {
            assert!(Projection::parse(&projection, Dialect::Find).is_err(), "{projection}");
        }
    }
}
