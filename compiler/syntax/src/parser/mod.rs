//! Tokens to a tree, by recursive descent. After an error the parser goes on at the next line that
//! can begin something, so that one run shows several errors.

mod expressions;
mod graph;
mod statements;

use crate::ast::{
    Element, Function, Initial, Name, Port, Record, Storage, TypeName, Unit, Variable,
};
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::lexer::{Kind, Token, tokens};
use crate::source::{FileId, Sources, Span};

/// Deepest nesting of blocks and brackets.
pub const DEEPEST: u32 = 64;

/// Parses one file.
pub fn parse(sources: &Sources, file: FileId, found: &mut Diagnostics) -> Unit {
    let tokens = tokens(sources, file, found);
    let mut parser = Parser { tokens, at: 0, found, depth: 0 };
    let mut unit = Unit::default();
    while !parser.at_end() {
        let before = parser.at;
        if parser.item(&mut unit).is_err() {
            parser.recover(before);
        }
    }
    unit
}

/// The diagnostic is recorded already.
pub(crate) struct Failed;

pub(crate) type Parsed<T> = Result<T, Failed>;

pub(crate) struct Parser<'a> {
    tokens: Vec<Token>,
    at: usize,
    found: &'a mut Diagnostics,
    depth: u32,
}

/// Words of built-in types without digits.
const TYPES: [&str; 6] = ["uint", "ulong", "ushort", "uchar", "bool", "void"];

/// True for `uint`, `uint12`, `bool`, ...
pub(crate) fn is_scalar_type(word: &str) -> bool {
    TYPES.contains(&word)
        || word.strip_prefix("uint").is_some_and(|digits| {
            !digits.is_empty() && digits.len() < 3 && digits.bytes().all(|b| b.is_ascii_digit())
        })
}

impl Parser<'_> {
    fn token(&self) -> &Token {
        &self.tokens[self.at.min(self.tokens.len() - 1)]
    }

    fn ahead(&self, count: usize) -> &Kind {
        &self.tokens[(self.at + count).min(self.tokens.len() - 1)].kind
    }

    fn at_end(&self) -> bool {
        self.token().kind == Kind::End
    }

    fn span(&self) -> Span {
        self.token().span
    }

    /// The token before this one.
    fn last_span(&self) -> Span {
        self.tokens[self.at.saturating_sub(1)].span
    }

    fn step(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    fn is(&self, symbol: &str) -> bool {
        matches!(self.token().kind, Kind::Symbol(found) if found == symbol)
    }

    fn is_word(&self, word: &str) -> bool {
        matches!(&self.token().kind, Kind::Name(found) if found == word)
    }

    fn accept(&mut self, symbol: &str) -> bool {
        let here = self.is(symbol);
        if here {
            self.step();
        }
        here
    }

    fn accept_word(&mut self, word: &str) -> bool {
        let here = self.is_word(word);
        if here {
            self.step();
        }
        here
    }

    fn seen(&self) -> String {
        match &self.token().kind {
            Kind::Name(name) => format!("{name:?}"),
            Kind::Number(number) => format!("{number}"),
            Kind::Text(_) => "a text".to_owned(),
            Kind::Directive(word) => format!(".{word}"),
            Kind::Pragma(_) => "a pragma".to_owned(),
            Kind::Symbol(symbol) => format!("{symbol:?}"),
            Kind::End => "the end of the file".to_owned(),
        }
    }

    fn fail<T>(&mut self, wanted: &str) -> Parsed<T> {
        let message = format!("expected {wanted}, found {}", self.seen());
        let span = self.span();
        self.found.push(Diagnostic::error("syntax", span, message).label(format!("not {wanted}")));
        Err(Failed)
    }

    fn expect(&mut self, symbol: &str) -> Parsed<Span> {
        let span = self.span();
        if self.accept(symbol) { Ok(span) } else { self.fail(&format!("{symbol:?}")) }
    }

    /// A `;`. Its absence is reported where the line should have ended.
    fn semicolon(&mut self) -> Parsed<()> {
        if self.accept(";") {
            return Ok(());
        }
        let span = self.last_span();
        let end = Span { start: span.end, ..span };
        let seen = self.seen();
        self.found.push(
            Diagnostic::error("syntax", end, format!("expected \";\", found {seen}"))
                .label("a \";\" belongs here"),
        );
        Err(Failed)
    }

    fn name(&mut self, wanted: &str) -> Parsed<Name> {
        if let Kind::Name(text) = &self.token().kind {
            let name = Name { text: text.clone(), span: self.span() };
            self.step();
            return Ok(name);
        }
        self.fail(wanted)
    }

    /// Goes on with the next token that can begin an item.
    fn recover(&mut self, before: usize) {
        if self.at == before {
            self.step();
        }
        self.depth = 0;
        while !self.at_end() {
            let token = self.token();
            let directive = matches!(&token.kind, Kind::Directive(word)
                if ["element", "import", "input", "output"].contains(&word.as_str()));
            let keyword = token.first_of_line
                && token.span.start > 0
                && matches!(&token.kind, Kind::Name(word)
                    if ["struct", "union", "const", "template"].contains(&word.as_str()));
            if directive || keyword || (token.first_of_line && self.is("}")) {
                if self.is("}") {
                    self.step();
                }
                return;
            }
            self.step();
        }
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth >= DEEPEST {
            let span = self.span();
            self.found.push(Diagnostic::error("too-deep", span, "this is nested too deeply"));
            self.at = self.tokens.len() - 1;
            return Err(Failed);
        }
        self.depth += 1;
        let result = inner(self);
        self.depth = self.depth.saturating_sub(1);
        result
    }

    fn item(&mut self, unit: &mut Unit) -> Parsed<()> {
        match self.token().kind.clone() {
            Kind::Directive(word) => match word.as_str() {
                "import" => {
                    self.step();
                    let span = self.span();
                    let Kind::Text(text) = self.token().kind.clone() else {
                        return self.fail("a file name in quotes");
                    };
                    self.step();
                    self.accept(";");
                    unit.imports.push((text, span));
                    Ok(())
                }
                "element" => {
                    let element = self.element()?;
                    unit.elements.push(element);
                    Ok(())
                }
                "input" | "output" => self.outside(unit, word == "input"),
                _ => self.fail(".element, .import, .input or .output"),
            },
            Kind::Name(word) => match word.as_str() {
                "struct" | "union" => {
                    let record = self.record()?;
                    unit.records.push(record);
                    Ok(())
                }
                "const" => {
                    self.step();
                    let mut variable = self.variable(Storage::Constant)?;
                    variable.storage = Storage::Constant;
                    self.semicolon()?;
                    unit.constants.push(variable);
                    Ok(())
                }
                "template" | "inline" => {
                    let function = self.function()?;
                    unit.functions.push(function);
                    Ok(())
                }
                _ => self.function_or_graph(unit, &word),
            },
            _ => self.fail("an element, a structure, a function or a part of the graph"),
        }
    }

    fn function_or_graph(&mut self, unit: &mut Unit, word: &str) -> Parsed<()> {
        let called =
            matches!(self.ahead(1), Kind::Name(_)) && matches!(self.ahead(2), Kind::Symbol("("));
        if (called || is_scalar_type(word)) && word != "host" && word != "verilog" {
            let function = self.function()?;
            unit.functions.push(function);
            return Ok(());
        }
        self.graph_item(unit)
    }

    fn record(&mut self) -> Parsed<Record> {
        let union = self.is_word("union");
        self.step();
        let name = self.name("the structure's name")?;
        self.expect("{")?;
        let mut fields = Vec::new();
        while !self.accept("}") {
            fields.push(self.variable(Storage::Chosen)?);
            self.semicolon()?;
        }
        self.accept(";");
        Ok(Record { name, union, fields })
    }

    fn type_name(&mut self) -> Parsed<TypeName> {
        let name = self.name("a type")?;
        let width = if self.accept("##") { Some(Box::new(self.primary()?)) } else { None };
        Ok(TypeName { name, width })
    }

    /// `type name[dimension]... = initial`.
    fn variable(&mut self, storage: Storage) -> Parsed<Variable> {
        let ty = self.type_name()?;
        self.variable_of(ty, storage)
    }

    fn variable_of(&mut self, ty: TypeName, storage: Storage) -> Parsed<Variable> {
        let name = self.name("a name")?;
        let mut dimensions = Vec::new();
        while self.accept("[") {
            dimensions.push(self.expression()?);
            self.expect("]")?;
        }
        let initial = if self.accept("=") {
            if self.accept("{") {
                let mut list = Vec::new();
                while !self.accept("}") {
                    list.push(self.expression()?);
                    if !self.accept(",") && !self.is("}") {
                        return self.fail("\",\" or \"}\"");
                    }
                }
                Some(Initial::List(list))
            } else {
                Some(Initial::Value(self.expression()?))
            }
        } else {
            None
        };
        Ok(Variable { ty, name, dimensions, initial, storage })
    }

    fn function(&mut self) -> Parsed<Function> {
        let template = if self.accept_word("template") {
            self.expect("<")?;
            let name = self.name("the template's parameter")?;
            self.expect(">")?;
            Some(name)
        } else {
            None
        };
        self.accept_word("inline");
        let result = self.type_name()?;
        let name = self.name("the function's name")?;
        self.expect("(")?;
        let mut parameters = Vec::new();
        while !self.accept(")") {
            parameters.push(self.variable(Storage::Chosen)?);
            if !self.accept(",") && !self.is(")") {
                return self.fail("\",\" or \")\"");
            }
        }
        let body = self.block()?;
        Ok(Function { name, result, parameters, body, template })
    }

    fn element(&mut self) -> Parsed<Element> {
        let start = self.span();
        self.step();
        let name = self.name("the element's name")?;
        let mut parameters = Vec::new();
        if self.accept("<") {
            while !self.accept(">") {
                let ty = self.type_name()?;
                let name = self.name("a parameter's name")?;
                let initial =
                    if self.accept("=") { Some(Initial::Value(self.shift_free()?)) } else { None };
                let storage = Storage::Constant;
                parameters.push(Variable { ty, name, dimensions: Vec::new(), initial, storage });
                if !self.accept(",") && !self.is(">") {
                    return self.fail("\",\" or \">\"");
                }
            }
        }
        self.expect("(")?;
        let inputs = self.ports("->")?;
        let outputs = self.ports(")")?;
        self.expect("{")?;
        let mut element = Element {
            name,
            parameters,
            inputs,
            outputs,
            state: Vec::new(),
            init: Vec::new(),
            handler: Vec::new(),
            signal: None,
            span: start,
        };
        let mut seen: Vec<(String, Span)> = Vec::new();
        while !self.is("}") {
            let Kind::Directive(word) = self.token().kind.clone() else {
                return self.fail(".state, .init, .handler or .signal");
            };
            let span = self.span();
            if let Some((_, first)) = seen.iter().find(|(other, _)| *other == word) {
                let first = *first;
                self.found.push(
                    Diagnostic::error("twice", span, format!("a second .{word}"))
                        .other(first, "the first"),
                );
            }
            seen.push((word.clone(), span));
            self.step();
            match word.as_str() {
                "state" => {
                    self.expect("{")?;
                    while !self.accept("}") {
                        let storage = self.storage();
                        element.state.push(self.variable(storage)?);
                        self.semicolon()?;
                    }
                }
                "init" => element.init = self.block()?,
                "handler" => element.handler = self.block()?,
                "signal" => {
                    if self.accept("(") {
                        // The spelling `.signal (ClSignal p)` names what read_signal() would give.
                        self.type_name()?;
                        self.name("a name")?;
                        self.expect(")")?;
                    }
                    element.signal = Some(self.block()?);
                }
                _ => {
                    self.at -= 1;
                    return self.fail(".state, .init, .handler or .signal");
                }
            }
        }
        let end = self.expect("}")?;
        element.span = start.to(end);
        Ok(element)
    }

    fn storage(&mut self) -> Storage {
        for (word, storage) in [
            ("register", Storage::Register),
            ("local", Storage::Local),
            ("global", Storage::Global),
            ("const", Storage::Constant),
        ] {
            if self.is_word(word) {
                self.step();
                return storage;
            }
        }
        Storage::Chosen
    }

    fn ports(&mut self, end: &str) -> Parsed<Vec<Port>> {
        let mut ports = Vec::new();
        while !self.accept(end) {
            let ty = self.type_name()?;
            let name = self.name("a port's name")?;
            ports.push(Port { ty, name });
            if !self.accept(",") && !self.is(end) {
                return self.fail(&format!("\",\" or {end:?}"));
            }
        }
        Ok(ports)
    }
}
