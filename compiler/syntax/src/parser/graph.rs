//! The graph: outside names, instances, edges.

use super::{Parsed, Parser};
use crate::ast::{Edge, End, Instance, Name, Outside, TypeName, Unit};
use crate::diagnostic::Diagnostic;
use crate::lexer::Kind;

impl Parser<'_> {
    /// `.input name` or `.input Type name`, several with commas.
    pub(super) fn outside(&mut self, unit: &mut Unit, input: bool) -> Parsed<()> {
        self.step();
        loop {
            let first = self.name("a name")?;
            let second = match self.token().kind.clone() {
                Kind::Name(text) if !self.token().first_of_line => {
                    let span = self.span();
                    self.step();
                    Some(Name { text, span })
                }
                _ => None,
            };
            let (ty, name) = match second {
                Some(name) => (Some(TypeName { name: first, width: None }), name),
                None => (None, first),
            };
            unit.outside.push(Outside { name, ty, input });
            if !self.accept(",") {
                break;
            }
        }
        self.accept(";");
        Ok(())
    }

    /// An instance or a chain of edges.
    pub(super) fn graph_item(&mut self, unit: &mut Unit) -> Parsed<()> {
        let qualified = (self.is_word("host") || self.is_word("verilog"))
            && matches!(self.ahead(1), Kind::Name(_));
        if qualified || matches!(self.ahead(1), Kind::Symbol("::")) {
            let instance = self.instance()?;
            unit.instances.push(instance);
            return Ok(());
        }
        let mut from = self.end_before_arrow()?;
        if !self.is("->") {
            return self.fail("\"::\" or \"->\"");
        }
        while self.is("->") {
            let span = self.span();
            self.step();
            let depth = if self.accept("{") {
                let depth = self.number("the channel's depth in entries")?;
                self.expect("}")?;
                Some(depth)
            } else {
                None
            };
            let into = self.port_number()?;
            let name = self.name("an instance or an outside name")?;
            let to = End { name: name.clone(), port: into };
            unit.edges.push(Edge { from, to, depth, span });
            let port = self.port_number()?;
            if port.is_some() && !self.is("->") {
                return self.fail("\"->\" after an output port's number");
            }
            from = End { name, port };
        }
        self.accept(";");
        Ok(())
    }

    fn end_before_arrow(&mut self) -> Parsed<End> {
        let name = self.name("an instance or an outside name")?;
        let port = self.port_number()?;
        Ok(End { name, port })
    }

    fn port_number(&mut self) -> Parsed<Option<(u64, crate::source::Span)>> {
        if !self.accept("[") {
            return Ok(None);
        }
        let span = self.span();
        let number = self.number("a port's number")?;
        self.expect("]")?;
        if number == 0 {
            self.found.push(Diagnostic::error("bad-port", span, "ports are numbered from 1"));
        }
        Ok(Some((number, span)))
    }

    pub(super) fn number(&mut self, wanted: &str) -> Parsed<u64> {
        if let Kind::Number(number) = self.token().kind {
            self.step();
            return Ok(number);
        }
        self.fail(wanted)
    }

    fn instance(&mut self) -> Parsed<Instance> {
        let mut host = false;
        let mut verilog = false;
        while matches!(self.ahead(1), Kind::Name(_)) {
            if self.accept_word("host") {
                host = true;
            } else if self.accept_word("verilog") {
                verilog = true;
            } else {
                return self.fail("\"host\" or \"verilog\" before an element's name");
            }
        }
        let element = self.name("an element's name")?;
        self.expect("::")?;
        let name = self.name("the instance's name")?;
        let mut instance = Instance {
            element,
            name,
            host,
            verilog,
            signalled: false,
            arguments: Vec::new(),
            copies: None,
        };
        loop {
            if self.accept("@") {
                instance.signalled = true;
            } else if self.accept("*") {
                instance.copies = Some(self.primary()?);
            } else if self.accept("(") {
                while !self.accept(")") {
                    let name = self.name("a parameter's name")?;
                    self.expect("=")?;
                    let value = self.expression()?;
                    instance.arguments.push((name, value));
                    if !self.accept(",") && !self.is(")") {
                        return self.fail("\",\" or \")\"");
                    }
                }
            } else {
                break;
            }
        }
        self.accept(";");
        Ok(instance)
    }
}
