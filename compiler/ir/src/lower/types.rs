//! Types and the names every element sees.

use std::collections::HashMap;

use beeline_syntax::Span;
use beeline_syntax::ast;

use crate::tree::MemField;

/// A type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    /// One bit; assignment asks "not zero".
    Bool,
    /// An unsigned number of 1 to 64 bits.
    Scalar(u32),
    /// A structure or union, by its place in [`World::records`].
    Record(usize),
    /// An array.
    Array(Box<Type>, u32),
    /// No value.
    Void,
}

/// A field of a record.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) offset: u32,
    pub(crate) ty: Type,
}

/// A structure or union, bit-packed: the first field has the lowest bits.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) bits: u32,
    pub(crate) fields: Vec<Field>,
    pub(crate) span: Option<Span>,
}

/// Everything a file and its imports declare.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub(crate) records: Vec<Record>,
    pub(crate) by_name: HashMap<String, usize>,
    pub(crate) constants: HashMap<String, Constant>,
    pub(crate) functions: HashMap<String, ast::Function>,
    pub(crate) elements: HashMap<String, ast::Element>,
}

/// A constant or constant table.
#[derive(Clone, Debug)]
pub(crate) struct Constant {
    pub(crate) ty: Type,
    pub(crate) dimensions: Vec<u32>,
    pub(crate) values: Vec<u64>,
    pub(crate) span: Span,
}

impl World {
    pub(crate) fn bits(&self, ty: &Type) -> u32 {
        match ty {
            Type::Bool => 1,
            Type::Scalar(bits) => *bits,
            Type::Record(at) => self.records[*at].bits,
            Type::Array(inner, count) => self.bits(inner).saturating_mul(*count),
            Type::Void => 0,
        }
    }

    pub(crate) fn show(&self, ty: &Type) -> String {
        match ty {
            Type::Bool => "bool".to_owned(),
            Type::Scalar(64) => "ulong".to_owned(),
            Type::Scalar(32) => "uint".to_owned(),
            Type::Scalar(16) => "ushort".to_owned(),
            Type::Scalar(8) => "uchar".to_owned(),
            Type::Scalar(bits) => format!("uint{bits}"),
            Type::Record(at) => self.records[*at].name.clone(),
            Type::Array(inner, count) => format!("{}[{count}]", self.show(inner)),
            Type::Void => "void".to_owned(),
        }
    }

    pub(crate) fn flit(&self) -> Type {
        Type::Record(0)
    }

    pub(crate) fn signal(&self) -> Type {
        Type::Record(1)
    }

    /// The fields of an entry, for memories.
    pub(crate) fn mem_fields(&self, ty: &Type) -> Vec<MemField> {
        match ty {
            Type::Record(at) => self.records[*at]
                .fields
                .iter()
                .map(|field| MemField {
                    name: field.name.clone(),
                    offset: field.offset,
                    bits: self.bits(&field.ty),
                })
                .collect(),
            _ => vec![MemField { name: String::new(), offset: 0, bits: self.bits(ty) }],
        }
    }

    /// With `flit` and `ClSignal`.
    pub(crate) fn new() -> Self {
        let mut world = Self::default();
        let array = |bits, count| Type::Array(Box::new(Type::Scalar(bits)), count);
        let field = |name: &str, offset, ty| Field { name: name.to_owned(), offset, ty };
        let own = Type::Record(0);
        world.add(Record {
            name: "flit".to_owned(),
            bits: 512,
            fields: vec![
                field("fdata", 0, array(8, 32)),
                field("half", 0, array(16, 16)),
                field("word", 0, array(32, 8)),
                field("quad", 0, array(64, 4)),
                field("sop", 256, Type::Scalar(1)),
                field("eop", 257, Type::Scalar(1)),
                field("pad", 258, Type::Scalar(5)),
                field("tag", 263, Type::Scalar(57)),
                field("meta", 320, array(64, 3)),
                // `x.flit.fd.sop` is `x.sop`.
                field("flit", 0, own.clone()),
                field("fd", 0, own),
            ],
            span: None,
        });
        world.add(Record {
            name: "ClSignal".to_owned(),
            bits: 512,
            fields: vec![
                field("Id", 0, Type::Scalar(16)),
                field("Cmd", 16, Type::Scalar(16)),
                field("Seq", 32, Type::Scalar(32)),
                field("Sig", 0, Type::Record(2)),
            ],
            span: None,
        });
        world.add(Record {
            name: "ClSignalPayload".to_owned(),
            bits: 512,
            fields: vec![field("LParam", 64, array(64, 7))],
            span: None,
        });
        world
    }

    pub(crate) fn add(&mut self, record: Record) {
        self.by_name.insert(record.name.clone(), self.records.len());
        self.records.push(record);
    }
}

/// The scalar type a word names.
pub(crate) fn scalar(word: &str) -> Option<Type> {
    Some(match word {
        "bool" => Type::Bool,
        "uchar" => Type::Scalar(8),
        "ushort" => Type::Scalar(16),
        "uint" => Type::Scalar(32),
        "ulong" => Type::Scalar(64),
        "void" => Type::Void,
        _ => {
            let bits: u32 = word.strip_prefix("uint")?.parse().ok()?;
            (1..=64).contains(&bits).then_some(Type::Scalar(bits))?
        }
    })
}
