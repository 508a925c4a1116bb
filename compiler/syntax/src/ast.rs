//! The syntax tree.

use crate::source::Span;

/// A name and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// The text.
    pub text: String,
    /// The place.
    pub span: Span,
}

/// A file's contents.
#[derive(Clone, Debug, Default)]
pub struct Unit {
    /// `.import "file"`.
    pub imports: Vec<(String, Span)>,
    /// Structures and unions.
    pub records: Vec<Record>,
    /// Constants, also tables.
    pub constants: Vec<Variable>,
    /// Functions.
    pub functions: Vec<Function>,
    /// Elements.
    pub elements: Vec<Element>,
    /// `.input` and `.output`: names for the graph's edges to the world.
    pub outside: Vec<Outside>,
    /// Instances.
    pub instances: Vec<Instance>,
    /// Chains of edges.
    pub edges: Vec<Edge>,
}

/// A structure or union.
#[derive(Clone, Debug)]
pub struct Record {
    /// Its name.
    pub name: Name,
    /// True for a union.
    pub union: bool,
    /// Fields.
    pub fields: Vec<Variable>,
}

/// Where a variable shall lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// The compiler chooses.
    #[default]
    Chosen,
    /// Registers.
    Register,
    /// Memory on the chip.
    Local,
    /// Board memory.
    Global,
    /// A constant.
    Constant,
}

/// A type as written.
#[derive(Clone, Debug)]
pub struct TypeName {
    /// The word.
    pub name: Name,
    /// `uint<N>`.
    pub width: Option<Box<Expression>>,
}

/// A variable, field, parameter or constant.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Type of one entry.
    pub ty: TypeName,
    /// Name.
    pub name: Name,
    /// Array dimensions.
    pub dimensions: Vec<Expression>,
    /// Initial value: one expression, or the entries of a table.
    pub initial: Option<Initial>,
    /// Storage class.
    pub storage: Storage,
}

/// What stands after `=` in a declaration.
#[derive(Clone, Debug)]
pub enum Initial {
    /// A value.
    Value(Expression),
    /// `{ a, b, ... }`.
    List(Vec<Expression>),
}

/// A function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Name.
    pub name: Name,
    /// Result; `void` for none.
    pub result: TypeName,
    /// Parameters.
    pub parameters: Vec<Variable>,
    /// Body.
    pub body: Vec<Statement>,
    /// Template parameter, a number, as in `template<T>`.
    pub template: Option<Name>,
}

/// A port of an element.
#[derive(Clone, Debug)]
pub struct Port {
    /// Type of its items.
    pub ty: TypeName,
    /// Name.
    pub name: Name,
}

/// An element.
#[derive(Clone, Debug)]
pub struct Element {
    /// Name.
    pub name: Name,
    /// Compile-time parameters with their defaults.
    pub parameters: Vec<Variable>,
    /// Inputs.
    pub inputs: Vec<Port>,
    /// Outputs.
    pub outputs: Vec<Port>,
    /// `.state`.
    pub state: Vec<Variable>,
    /// `.init`.
    pub init: Vec<Statement>,
    /// `.handler`.
    pub handler: Vec<Statement>,
    /// `.signal`.
    pub signal: Option<Vec<Statement>>,
    /// The whole declaration.
    pub span: Span,
}

/// A statement with its place.
#[derive(Clone, Debug)]
pub struct Statement {
    /// What.
    pub kind: StatementKind,
    /// Where.
    pub span: Span,
}

/// Pragmas in front of a loop or block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pragmas {
    /// `unroll` (0: fully) or `unroll K`.
    pub unroll: Option<u32>,
    /// `max_iter N`.
    pub max_iter: Option<u32>,
    /// `flatten K`: K copies of the body in one iteration.
    pub flatten: Option<u32>,
    /// `ivdep`.
    pub ivdep: bool,
}

/// Statements.
#[derive(Clone, Debug)]
pub enum StatementKind {
    /// A declaration.
    Declare(Variable),
    /// `target op= value`; the operator without `=`, empty for plain assignment.
    Assign {
        /// Place.
        target: Expression,
        /// `+` of `+=`, or empty.
        operator: &'static str,
        /// Value.
        value: Expression,
    },
    /// A call whose result is dropped.
    Call(Expression),
    /// `if`.
    If {
        /// Condition.
        condition: Expression,
        /// Then.
        then: Vec<Statement>,
        /// Else.
        otherwise: Vec<Statement>,
    },
    /// `for`, `while` and `do`.
    Loop {
        /// Before the loop.
        before: Vec<Statement>,
        /// Checked before each turn, or after it for `do`.
        condition: Option<Expression>,
        /// After each turn.
        step: Vec<Statement>,
        /// Turn.
        body: Vec<Statement>,
        /// `do ... while`.
        check_last: bool,
        /// Pragmas.
        pragmas: Pragmas,
    },
    /// `switch`.
    Switch {
        /// Value.
        value: Expression,
        /// Labels (none: default) with their statements; no fall-through past statements.
        arms: Vec<(Vec<Expression>, bool, Vec<Statement>)>,
    },
    /// `{ ... }`, perhaps with `ivdep`.
    Block(Vec<Statement>, Pragmas),
    /// `.async { ... }`.
    Async(Vec<Statement>),
    /// `break`.
    Break,
    /// `continue`.
    Continue,
    /// `return`.
    Return(Option<Expression>),
}

/// An expression with its place.
#[derive(Clone, Debug)]
pub struct Expression {
    /// What.
    pub kind: ExpressionKind,
    /// Where.
    pub span: Span,
}

/// Expressions.
#[derive(Clone, Debug)]
pub enum ExpressionKind {
    /// A number.
    Number(u64),
    /// `true`, `false`.
    Bool(bool),
    /// A text, for `printf`.
    Text(String),
    /// A name.
    Name(String),
    /// `a.b`.
    Field(Box<Expression>, Name),
    /// `a[i]`.
    Index(Box<Expression>, Box<Expression>),
    /// `a[hi:lo]`.
    Slice(Box<Expression>, Box<Expression>, Box<Expression>),
    /// `f(a, b)`, `f<N>(a)`.
    Call(Name, Option<Box<Expression>>, Vec<Expression>),
    /// `(type) a`.
    Cast(TypeName, Box<Expression>),
    /// `-a`, `!a`, `~a`.
    Unary(&'static str, Box<Expression>),
    /// `a + b`.
    Binary(&'static str, Box<Expression>, Box<Expression>),
    /// `a ? b : c`.
    Choose(Box<Expression>, Box<Expression>, Box<Expression>),
}

/// `.input name` or `.output name`.
#[derive(Clone, Debug)]
pub struct Outside {
    /// Name.
    pub name: Name,
    /// Item type; `flit` unless said.
    pub ty: Option<TypeName>,
    /// True for `.input`.
    pub input: bool,
}

/// `host Element :: name @ (a = 1)`.
#[derive(Clone, Debug)]
pub struct Instance {
    /// Element.
    pub element: Name,
    /// Instance.
    pub name: Name,
    /// On the processor in every build.
    pub host: bool,
    /// Hand-written Verilog in hardware builds.
    pub verilog: bool,
    /// The manager may signal it.
    pub signalled: bool,
    /// Values of parameters.
    pub arguments: Vec<(Name, Expression)>,
    /// Copies behind a distributor.
    pub copies: Option<Expression>,
}

/// One end of an edge.
#[derive(Clone, Debug)]
pub struct End {
    /// Instance or outside name.
    pub name: Name,
    /// Port number, from 1.
    pub port: Option<(u64, Span)>,
}

/// An edge.
#[derive(Clone, Debug)]
pub struct Edge {
    /// Writer.
    pub from: End,
    /// Reader.
    pub to: End,
    /// Entries of the channel.
    pub depth: Option<u64>,
    /// The arrow.
    pub span: Span,
}
