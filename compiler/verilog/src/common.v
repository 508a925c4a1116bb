// A bounded channel: first word falls through, fill count registered on both sides.
module np_fifo #(parameter W = 512, parameter D = 16, parameter A = 4) (
    input clk, input rst,
    input [W-1:0] wdata, input wvalid, output wready,
    output [W-1:0] rdata, output rvalid, input rready
);
    reg [W-1:0] items [0:D-1];
    reg [A:0] count;
    reg [A-1:0] rp;
    reg [A-1:0] wp;
    wire push = wvalid && wready;
    wire pop = rvalid && rready;
    assign wready = count < D;
    assign rvalid = count != 0;
    assign rdata = items[rp];
    always @(posedge clk) begin
        if (push) items[wp] <= wdata;
        if (rst) begin
            count <= 0;
            rp <= 0;
            wp <= 0;
        end else begin
            if (push) wp <= wp == D - 1 ? {A{1'b0}} : wp + 1'b1;
            if (pop) rp <= rp == D - 1 ? {A{1'b0}} : rp + 1'b1;
            if (push && !pop) count <= count + 1'b1;
            if (pop && !push) count <= count - 1'b1;
        end
    end
endmodule

// A link of the chain of signals: takes its element's signals, passes the others on, and puts the
// element's answers on the chain. Nothing here waits for the data path.
module np_cmd #(parameter ID = 1) (
    input clk, input rst,
    input u_valid, input [511:0] u_data, output u_ready,
    output d_valid, output [511:0] d_data, input d_ready,
    output s_valid, output [511:0] s_data,
    input a_valid, input [511:0] a_data
);
    reg full;
    reg [511:0] data;
    reg busy;
    reg [511:0] held;
    reg answered;
    wire mine = u_data[15:0] == ID;
    assign u_ready = mine ? !busy : !full && !answered;
    assign d_valid = full;
    assign d_data = data;
    assign s_valid = busy && !answered;
    assign s_data = held;
    always @(posedge clk) begin
        if (rst) begin
            full <= 1'b0;
            busy <= 1'b0;
            answered <= 1'b0;
        end else begin
            if (full && d_ready) full <= 1'b0;
            if (u_valid && u_ready && mine) begin
                busy <= 1'b1;
                held <= u_data;
            end
            if (u_valid && u_ready && !mine) begin
                full <= 1'b1;
                data <= u_data;
            end
            if (a_valid && busy && !answered) begin
                answered <= 1'b1;
                held <= {a_data[511:16], held[15:0]};
            end
            if (answered && !full) begin
                full <= 1'b1;
                data <= held;
                answered <= 1'b0;
                busy <= 1'b0;
            end
        end
    end
endmodule
