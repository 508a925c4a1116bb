//! Statements.

use super::{Parsed, Parser, is_scalar_type};
use crate::ast::{Expression, ExpressionKind, Pragmas, Statement, StatementKind};
use crate::diagnostic::Diagnostic;
use crate::lexer::Kind;
use crate::source::Span;

const STORAGES: [&str; 4] = ["register", "local", "global", "const"];

impl Parser<'_> {
    pub(super) fn block(&mut self) -> Parsed<Vec<Statement>> {
        self.expect("{")?;
        self.deeper(|parser| {
            let mut list = Vec::new();
            while !parser.accept("}") {
                if parser.at_end() {
                    return parser.fail("\"}\"");
                }
                let before = parser.at;
                if parser.statement_into(&mut list).is_err() {
                    parser.next_statement(before);
                }
            }
            Ok(list)
        })
    }

    /// After an error: past the next `;`, or to the next line or brace.
    fn next_statement(&mut self, before: usize) {
        if self.at == before && !self.is("}") {
            self.step();
        }
        while !self.at_end() && !self.is("}") && !self.token().first_of_line {
            if self.accept(";") {
                return;
            }
            self.step();
        }
    }

    /// A block, or one statement.
    fn body(&mut self) -> Parsed<Vec<Statement>> {
        if self.is("{") {
            return self.block();
        }
        self.deeper(|parser| {
            let mut list = Vec::new();
            parser.statement_into(&mut list)?;
            Ok(list)
        })
    }

    fn statement_into(&mut self, list: &mut Vec<Statement>) -> Parsed<()> {
        if self.accept(";") {
            return Ok(());
        }
        let start = self.span();
        if self.declaration_here() {
            let storage = self.storage();
            let ty = self.type_name()?;
            loop {
                let variable = self.variable_of(ty.clone(), storage)?;
                let span = start.to(self.last_span());
                list.push(Statement { kind: StatementKind::Declare(variable), span });
                if !self.accept(",") {
                    break;
                }
            }
            return self.semicolon();
        }
        let kind = self.statement(start)?;
        let span = start.to(self.last_span());
        list.push(Statement { kind, span });
        Ok(())
    }

    fn declaration_here(&self) -> bool {
        let Kind::Name(word) = &self.token().kind else { return false };
        if STORAGES.contains(&word.as_str()) {
            return true;
        }
        match self.ahead(1) {
            Kind::Name(_) => !["return", "else", "do", "goto"].contains(&word.as_str()),
            Kind::Symbol("##") => is_scalar_type(word),
            _ => false,
        }
    }

    fn statement(&mut self, start: Span) -> Parsed<StatementKind> {
        match self.token().kind.clone() {
            Kind::Symbol("{") => Ok(StatementKind::Block(self.block()?, Pragmas::default())),
            Kind::Directive(word) if word == "async" => {
                self.step();
                Ok(StatementKind::Async(self.block()?))
            }
            Kind::Pragma(_) => self.with_pragmas(),
            Kind::Name(word) => match word.as_str() {
                "if" => self.if_statement(),
                "for" | "while" | "do" => self.loop_statement(Pragmas::default()),
                "switch" => self.switch_statement(),
                "break" | "continue" => {
                    self.step();
                    self.semicolon()?;
                    Ok(if word == "break" { StatementKind::Break } else { StatementKind::Continue })
                }
                "return" => {
                    self.step();
                    let value = if self.is(";") { None } else { Some(self.expression()?) };
                    self.semicolon()?;
                    Ok(StatementKind::Return(value))
                }
                "else" | "case" | "default" | "goto" => {
                    self.found.push(Diagnostic::error(
                        "syntax",
                        start,
                        format!("{word:?} has no place here"),
                    ));
                    Err(super::Failed)
                }
                _ => {
                    let kind = self.simple()?;
                    self.semicolon()?;
                    Ok(kind)
                }
            },
            Kind::Symbol("++" | "--") => {
                let kind = self.simple()?;
                self.semicolon()?;
                Ok(kind)
            }
            _ => self.fail("a statement"),
        }
    }

    /// An assignment, `i++`, or a call.
    fn simple(&mut self) -> Parsed<StatementKind> {
        let one = |span| Expression { kind: ExpressionKind::Number(1), span };
        for (symbol, operator) in [("++", "+"), ("--", "-")] {
            if self.is(symbol) {
                let span = self.span();
                self.step();
                let target = self.unary()?;
                return Ok(StatementKind::Assign { target, operator, value: one(span) });
            }
        }
        let target = self.expression()?;
        for (symbol, operator) in [("++", "+"), ("--", "-")] {
            if self.is(symbol) {
                let span = self.span();
                self.step();
                return Ok(StatementKind::Assign { target, operator, value: one(span) });
            }
        }
        const ASSIGN: [(&str, &str); 11] = [
            ("=", ""),
            ("+=", "+"),
            ("-=", "-"),
            ("*=", "*"),
            ("/=", "/"),
            ("%=", "%"),
            ("&=", "&"),
            ("|=", "|"),
            ("^=", "^"),
            ("<<=", "<<"),
            (">>=", ">>"),
        ];
        for (symbol, operator) in ASSIGN {
            if self.accept(symbol) {
                let value = self.expression()?;
                return Ok(StatementKind::Assign { target, operator, value });
            }
        }
        if matches!(target.kind, ExpressionKind::Call(..)) {
            return Ok(StatementKind::Call(target));
        }
        self.fail("an assignment or a call")
    }

    fn with_pragmas(&mut self) -> Parsed<StatementKind> {
        let mut pragmas = Pragmas::default();
        let mut span = self.span();
        while let Kind::Pragma(text) = self.token().kind.clone() {
            span = self.span();
            let mut words = text.split_whitespace();
            let word = words.next().unwrap_or("");
            let number = words
                .next()
                .map(|text| text.trim_matches(|c| c == '(' || c == ')').parse::<u32>().ok());
            let ok = match (word, number) {
                ("unroll", None) => {
                    pragmas.unroll = Some(0);
                    true
                }
                ("unroll", Some(Some(count))) if count > 0 => {
                    pragmas.unroll = Some(count);
                    true
                }
                ("max_iter", Some(Some(count))) if count > 0 => {
                    pragmas.max_iter = Some(count);
                    true
                }
                ("flatten", None) => {
                    pragmas.flatten = Some(1);
                    true
                }
                ("flatten", Some(Some(count))) if count > 0 => {
                    pragmas.flatten = Some(count);
                    true
                }
                ("ivdep", None) => {
                    pragmas.ivdep = true;
                    true
                }
                _ => false,
            };
            if !ok || words.next().is_some() {
                self.found.push(
                    Diagnostic::error("bad-pragma", span, "not a pragma of this language")
                        .help("unroll [K], flatten [K], max_iter N, ivdep"),
                );
            }
            self.step();
        }
        match &self.token().kind {
            Kind::Name(word) if ["for", "while", "do"].contains(&word.as_str()) => {
                self.loop_statement(pragmas)
            }
            Kind::Symbol("{") if pragmas.unroll.is_none() && pragmas.max_iter.is_none() => {
                Ok(StatementKind::Block(self.block()?, pragmas))
            }
            _ => {
                self.found.push(Diagnostic::error(
                    "bad-pragma",
                    span,
                    "a pragma stands in front of a loop (ivdep also of a block)",
                ));
                Err(super::Failed)
            }
        }
    }

    fn if_statement(&mut self) -> Parsed<StatementKind> {
        self.step();
        self.expect("(")?;
        let condition = self.expression()?;
        self.expect(")")?;
        let then = self.body()?;
        let otherwise = if self.accept_word("else") { self.body()? } else { Vec::new() };
        Ok(StatementKind::If { condition, then, otherwise })
    }

    fn loop_statement(&mut self, pragmas: Pragmas) -> Parsed<StatementKind> {
        let Kind::Name(word) = self.token().kind.clone() else { return self.fail("a loop") };
        self.step();
        if word == "do" {
            let body = self.body()?;
            if !self.accept_word("while") {
                return self.fail("\"while\" after the body of \"do\"");
            }
            self.expect("(")?;
            let condition = Some(self.expression()?);
            self.expect(")")?;
            self.semicolon()?;
            return Ok(StatementKind::Loop {
                before: Vec::new(),
                condition,
                step: Vec::new(),
                body,
                check_last: true,
                pragmas,
            });
        }
        self.expect("(")?;
        if word == "while" {
            let condition = Some(self.expression()?);
            self.expect(")")?;
            let body = self.body()?;
            return Ok(StatementKind::Loop {
                before: Vec::new(),
                condition,
                step: Vec::new(),
                body,
                check_last: false,
                pragmas,
            });
        }
        let mut before = Vec::new();
        if !self.accept(";") {
            self.statement_into(&mut before)?;
        }
        let condition = if self.is(";") { None } else { Some(self.expression()?) };
        self.semicolon()?;
        let mut step = Vec::new();
        while !self.is(")") {
            let start = self.span();
            let kind = self.simple()?;
            step.push(Statement { kind, span: start.to(self.last_span()) });
            if !self.accept(",") {
                break;
            }
        }
        self.expect(")")?;
        let body = self.body()?;
        Ok(StatementKind::Loop { before, condition, step, body, check_last: false, pragmas })
    }

    fn switch_statement(&mut self) -> Parsed<StatementKind> {
        self.step();
        self.expect("(")?;
        let value = self.expression()?;
        self.expect(")")?;
        self.expect("{")?;
        let mut arms: Vec<(Vec<Expression>, bool, Vec<Statement>)> = Vec::new();
        while !self.accept("}") {
            let mut labels = Vec::new();
            let mut default = false;
            loop {
                if self.accept_word("case") {
                    labels.push(self.ternary_free()?);
                    self.expect(":")?;
                } else if self.accept_word("default") {
                    default = true;
                    self.expect(":")?;
                } else {
                    break;
                }
            }
            if labels.is_empty() && !default {
                return self.fail("\"case\" or \"default\"");
            }
            let body = self.deeper(|parser| {
                let mut body = Vec::new();
                while !parser.is("}") && !parser.is_word("case") && !parser.is_word("default") {
                    if parser.at_end() {
                        return parser.fail("\"}\"");
                    }
                    parser.statement_into(&mut body)?;
                }
                Ok(body)
            })?;
            arms.push((labels, default, body));
        }
        for (_, _, body) in &mut arms {
            let ends = matches!(
                body.last().map(|last| &last.kind),
                Some(StatementKind::Break | StatementKind::Return(_) | StatementKind::Continue)
            );
            if let (true, Some(StatementKind::Break)) = (ends, body.last().map(|s| &s.kind)) {
                body.pop();
            }
        }
        Ok(StatementKind::Switch { value, arms })
    }
}
